"""`isoscale test` and `isoscale predict`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from isoscale.cli import complete
from isoscale.cli.output import print_json

if TYPE_CHECKING:
    from torch import Tensor

    from isoscale.run import Run

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
ROLE = Annotated[Literal["train", "val", "test"], typer.Option(help="Which part of the data.")]


def test(
    run: RUN = None,
    checkpoint: CHECKPOINT = None,
    role: ROLE = "test",
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
) -> None:
    """Measure a run's weights on its test data."""
    from isoscale.api import test as measure
    from isoscale.run import Run

    found = Run.find(run)
    metrics = measure(found, checkpoint, role=role)
    if as_json:
        print_json(metrics)
        return
    from isoscale.observe.text import number, table

    rows = [(name, number(value)) for name, value in metrics.items()]
    print("\n".join([f"{found.path}, {_checkpoint_words(found, checkpoint)}", *table(rows)]))


def predict(
    run: RUN = None,
    out: Annotated[Path | None, typer.Option(help="An .npz or .safetensors file; default RUN/predictions.npz.")] = None,
    checkpoint: CHECKPOINT = None,
    role: ROLE = "test",
) -> None:
    """Write what a run's weights predict, one row a sample, in the order of the data."""
    from isoscale.api import predict as apply
    from isoscale.run import Run

    found = Run.find(run)
    target = out or found.path / "predictions.npz"
    _check_suffix(target)
    tensors = apply(found, checkpoint, role=role)
    _write(target, tensors)
    print(f"{found.path}, {_checkpoint_words(found, checkpoint)}: written to {target}")
    for name, tensor in tensors.items():
        print(f"  {name}: {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}")


def _checkpoint_words(run: "Run", checkpoint: str | None) -> str:
    """`best checkpoint, step 69`."""
    step = int(run.checkpoint(checkpoint).name.removeprefix("step_"))
    pointer = checkpoint or ("best" if run.has_best else "last")
    return f"step {step}" if pointer.removeprefix("step_").isdigit() else f"{pointer} checkpoint, step {step}"


def _check_suffix(path: Path) -> None:
    from isoscale.errors import UserError

    if path.suffix not in (".npz", ".safetensors"):
        raise UserError(f"--out {path}: predictions are written as .npz or .safetensors")
    if not path.parent.is_dir():
        raise UserError(f"--out {path}: there is no folder {path.parent}")


def _write(path: Path, tensors: "dict[str, Tensor]") -> None:
    if path.suffix == ".npz":
        import numpy

        arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
        numpy.savez(path, **arrays)
    else:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
