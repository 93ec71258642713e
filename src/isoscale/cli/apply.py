"""`isoscale test` and `isoscale predict`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

RUN = Annotated[str | None, typer.Argument(help="Directory or name of a run; by default the newest.")]
CHECKPOINT = Annotated[str | None, typer.Option(help="best, last or a step; by default best.")]
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
        import json

        print(json.dumps(metrics))
        return
    print(f"{found.path} (checkpoint {found.checkpoint(checkpoint).name})")
    width = max(map(len, metrics), default=0)
    for name, value in metrics.items():
        print(f"  {name:{width}}  {value:.4g}")


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
    for name, tensor in tensors.items():
        print(f"{name}: {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}")
    print(f"written to {target}")


def _check_suffix(path: Path) -> None:
    from isoscale.errors import UserError

    if path.suffix not in (".npz", ".safetensors"):
        raise UserError(f"--out {path}: predictions are written as .npz or .safetensors")
    if not path.parent.is_dir():
        raise UserError(f"--out {path}: there is no folder {path.parent}")


def _write(path: Path, tensors: dict) -> None:  # type: ignore[type-arg]
    if path.suffix == ".npz":
        import numpy

        numpy.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})
    else:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
