"""Checkpoint files of Lightning (`.ckpt`): weights and hyperparameters of a run, for `load_from_checkpoint`."""

import io
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import nn

from isoscale.engine.lightning.ckpt import plain_parameters, version
from isoscale.errors import UserError
from isoscale.runs.run import Run
from isoscale.system.files import failures_in_words, write_aside


def write_ckpt(run: Run, path: Path, checkpoint: str | None = None) -> tuple[dict[str, str], list[str]]:
    """Write the weights of a checkpoint, by the module's own names; what the file says of itself, and what it lacks.

    Optimizer and position are not in it: those are in the run, which is continued as such.
    """
    task, step = run.task(checkpoint), int(run.checkpoint(checkpoint).name.removeprefix("step_"))
    record = run.record
    per_epoch = max(1, int(record.get("steps_per_epoch") or record.get("num_steps") or 1))
    contents: dict[str, Any] = {
        "epoch": max(0, step - 1) // per_epoch,
        "global_step": step,
        "pytorch-lightning_version": version(),
        "state_dict": task.state_dict(),
        "loops": {},
        "callbacks": {},
        "optimizer_states": [],
        "lr_schedulers": [],
    }
    kept, left_out = plain_parameters(task)
    if kept:
        contents |= {"hparams_name": getattr(task, "_hparams_name", "kwargs"), "hyper_parameters": kept}
    written = io.BytesIO()
    torch.save(contents, written)
    with failures_in_words(path):
        write_aside(path, written.getvalue())
    note = f"hyperparameters that are no plain values are not in the file: {', '.join(left_out)}; give them again: "
    notes = [f"{note}{type(task).__name__}.load_from_checkpoint(FILE, {left_out[0]}=…)"] if left_out else []
    return {"epoch": str(contents["epoch"]), "step": str(step), "hyperparameters": ", ".join(kept) or "none"}, notes


def load_ckpt(path: Path, task: nn.Module) -> None:
    """Give a task the weights of a `.ckpt` file, from wherever it is; nothing in it is executed."""
    try:
        contents = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"ckpt_path={str(path)!r}: there is no such file") from None
    except (UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise UserError(
            f"{path} cannot be read without running code that it holds ({str(error).partition('. ')[0][:200]}): write "
            "the weights alone with the program that made it: torch.save(module.state_dict(), 'weights.pt')"
        ) from None
    weights = contents.get("state_dict", contents) if isinstance(contents, dict) else None
    if not isinstance(weights, dict):
        raise UserError(f"{path} holds no weights (state_dict)")
    try:
        task.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"the weights in {path} are not those of {type(task).__name__}: {error}") from None
