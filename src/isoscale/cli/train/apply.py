"""`isoscale test` and `isoscale predict`."""

import signal
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from isoscale.cli import complete
from isoscale.cli.arguments import Trust, start_ranks
from isoscale.cli.output import print_json
from isoscale.science.registry import applied_to
from isoscale.system.printing import echo

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
DATA = Annotated[
    list[str] | None,
    typer.Option("--data", "--systems", metavar="PATH…", help=f"Other data than that of the run: {applied_to()}."),
]
MORE_WORDS = {"allow_extra_args": True}
"""Settings of commands whose --data takes several paths, which a shell makes of one with a star."""
PRINT_SCALE = 2
"""Dots of a picture that goes into a talk, of those that a screen needs."""


def test(
    context: typer.Context,
    run: RUN = None,
    checkpoint: CHECKPOINT = None,
    split: SPLIT = "test",
    data: DATA = None,
    trust: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
) -> None:
    """Measure a run's weights on its test data, or on other data."""
    paths = _paths(context, data, split != "test")
    from isoscale.runs.inference import measure, other_data
    from isoscale.runs.run import Run

    found = Run.find(run, trust=trust)
    measured = measure(found, checkpoint, other_data(found, paths, split) if paths else None, split)
    if as_json:
        print_json(measured.metrics)
        return
    from isoscale.cli.train.metric_tables import lines

    echo(f"{found.path}, {found.checkpoint_words(checkpoint)}")
    echo("\n".join(lines(measured.metrics, measured.units, measured.of_all)))
    pictures = _draw(found.path / ("systems" if paths else split), measured.figures)
    if pictures:
        echo("\n".join(["", "pictures:", *(f"  {picture}" for picture in pictures)]))


def _paths(context: typer.Context, data: list[str] | None, has_split: bool) -> list[str]:
    """All paths after --data."""
    from isoscale.errors import UserError

    if context.args and not data:
        context.fail(f"Got unexpected extra argument ({' '.join(context.args)})")
    if data and has_split:
        raise UserError("--split is a part of the run's own data; leave it out where --data says which to take")
    return [*(data or ()), *context.args]


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
        typer.Option(
            help="An .npz or .safetensors file, or a folder; of whole boxes an .h5 file or a folder. By default "
            "RUN/predictions.npz, of boxes RUN/predictions."
        ),
    ] = None,
    checkpoint: CHECKPOINT = None,
    split: Annotated[
        Literal["train", "val", "test", "predict"], typer.Option("--split", "--role", help="Which part of the data.")
    ] = "test",
    data: DATA = None,
    devices: Annotated[
        int | None,
        typer.Option("--devices", min=1, metavar="N", help="Predict boxes or crystals with N processes here."),
    ] = None,
    trust: Trust = False,
) -> None:
    """Write what a run's weights predict: one row per sample, in the order of the data, or whole boxes."""
    paths = _paths(context, data, split != "test")
    start_ranks(devices)
    from isoscale.runs.inference import write_predictions
    from isoscale.runs.run import Run

    found = Run.find(run, trust=trust)
    with _stopped_in_order():
        written = write_predictions(found, out, checkpoint, paths, split)
    if not written.is_main:
        return
    echo(f"{found.path}, {found.checkpoint_words(checkpoint)}: written to {written.place}")
    for name, tensor in written.arrays.items():
        kind = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        echo(f"  {name}: {kind if tensor.dim() else f'{tensor.item():.10g}'}")


@contextmanager
def _stopped_in_order() -> "Iterator[None]":
    """A request to stop is an error like others meanwhile, after which nothing half-written is left."""
    from isoscale.errors import StoppedEarly
    from isoscale.system import signals
    from isoscale.system.printing import shout

    def stop(number: int, frame: object) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        shout(f"{signal.Signals(number).name}: stopped; nothing was written\n")
        raise StoppedEarly

    with signals.hearing(stop):
        yield
