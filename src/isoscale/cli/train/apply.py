"""`isoscale test` and `isoscale predict`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from isoscale.cli import complete
from isoscale.cli.arguments import Trust
from isoscale.cli.output import print_json
from isoscale.science.registry import applied_to
from isoscale.system.printing import echo

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from isoscale.observe.figures import Figure

RUN = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN", help="Directory or name of a run; by default the newest.", autocompletion=complete.runs
    ),
]
CHECKPOINT = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="best, last or a step; by default best.", autocompletion=complete.checkpoints),
]
SPLIT = Annotated[Literal["train", "val", "test"], typer.Option("--split", "--role", help="Which part of the data.")]
SYSTEMS = Annotated[
    list[str] | None,
    typer.Option(metavar="PATH…", help=f"Other data than that of the run: {applied_to()}."),
]
MORE_WORDS = {"allow_extra_args": True}
"""Settings of commands whose --systems takes several paths, which a shell makes of one with a star."""
PRINT_SCALE = 2
"""Dots of a picture that goes into a talk, of those that a screen needs."""


def test(
    context: typer.Context,
    run: RUN = None,
    checkpoint: CHECKPOINT = None,
    split: SPLIT = "test",
    systems: SYSTEMS = None,
    trust: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
) -> None:
    """Measure a run's weights on its test data, or on other data."""
    paths = _paths(context, systems, split != "test")
    from isoscale.runs.inference import measure, other_systems
    from isoscale.runs.run import Run

    found = Run.find(run, trust=trust)
    measured = measure(found, checkpoint, other_systems(found, paths) if paths else None, split)
    if as_json:
        print_json(measured.metrics)
        return
    from isoscale.cli.train.metric_tables import lines

    echo(f"{found.path}, {found.checkpoint_words(checkpoint)}")
    echo("\n".join(lines(measured.metrics, measured.units, measured.of_all)))
    pictures = _draw(found.path / ("systems" if paths else split), measured.figures)
    if pictures:
        echo("\n".join(["", "pictures:", *(f"  {picture}" for picture in pictures)]))


def _paths(context: typer.Context, systems: list[str] | None, has_split: bool) -> list[str]:
    """All paths after --systems."""
    from isoscale.errors import UserError

    if context.args and not systems:
        context.fail(f"Got unexpected extra argument ({' '.join(context.args)})")
    if systems and has_split:
        raise UserError("--split is a part of the run's own data; leave it out where --systems says which data to take")
    return [*(systems or ()), *context.args]


def _draw(folder: Path, figures: "Mapping[str, Figure]") -> list[Path]:
    """Write what a task shows as PNG files; their paths."""
    if not figures:
        return []
    from isoscale.observe.drawing import draw
    from isoscale.observe.figures import Network
    from isoscale.observe.style import png
    from isoscale.system.files import failures_in_words, own_folder, write_aside

    drawn = {
        name: png(draw(name, shown), PRINT_SCALE) for name, shown in figures.items() if not isinstance(shown, Network)
    }
    paths = {name: folder / f"{name.replace('/', '-')}.png" for name in drawn}
    with failures_in_words(folder):
        own_folder(folder)
    for name, path in paths.items():
        with failures_in_words(path):
            write_aside(path, drawn[name])
    return list(paths.values())


def predict(
    context: typer.Context,
    run: RUN = None,
    out: Annotated[
        Path | None,
        typer.Option(help="An .npz or .safetensors file, or a folder for .npy files; default RUN/predictions.npz."),
    ] = None,
    checkpoint: CHECKPOINT = None,
    split: Annotated[
        Literal["train", "val", "test", "predict"], typer.Option("--split", "--role", help="Which part of the data.")
    ] = "test",
    systems: SYSTEMS = None,
    trust: Trust = False,
) -> None:
    """Write what a run's weights predict, one row per sample, in the order of the data."""
    paths = _paths(context, systems, split != "test")
    from isoscale.runs.inference import other_systems
    from isoscale.runs.inference import predict as apply
    from isoscale.runs.run import Run

    found = Run.find(run, trust=trust)
    target = out or found.path / "predictions.npz"
    folder = _checked_folder(target)
    if paths:
        tensors = apply(found, checkpoint, other_systems(found, paths), "predict", folder=folder)
    else:
        tensors = apply(found, checkpoint, split=split, folder=folder)
    if folder is None:
        _write(target, tensors)
    echo(f"{found.path}, {found.checkpoint_words(checkpoint)}: written to {target}")
    for name, tensor in tensors.items():
        kind = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        echo(f"  {name}: {kind if tensor.dim() else f'{tensor.item():.10g}'}")


def _checked_folder(path: Path) -> Path | None:
    """The folder that predictions go to, made where it is not there; None where they go into one file."""
    from isoscale.errors import UserError
    from isoscale.system.files import failures_in_words

    is_folder = path.is_dir() or not path.suffix
    if not is_folder and path.suffix not in (".npz", ".safetensors"):
        raise UserError(f"--out {path}: predictions are written as .npz or .safetensors, or into a folder")
    if not path.parent.is_dir():
        raise UserError(f"--out {path}: there is no folder {path.parent}")
    if not is_folder:
        return None
    with failures_in_words(path):
        path.mkdir(exist_ok=True)
    return path


def _write(path: Path, tensors: "dict[str, Tensor]") -> None:
    import numpy

    from isoscale.engine.state.tensor_files import save_tensors
    from isoscale.system.files import failures_in_words, written_aside

    with failures_in_words(path), written_aside(path) as file:
        if path.suffix == ".npz":
            arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
            numpy.savez(file, **arrays)
        else:
            save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()}, file.name)
