"""A step that broke down as a few files that run without the data: weights, batch, and a script of some lines.

step_00000031/
  weights.safetensors   before the step
  batch.safetensors     the part of the batch that is to blame, after transforms, and the indices of its samples
  report.json           what was found, and what the script needs to know
  reproduce.py          runs the task's training_step on them and shows the first operation that is not finite
"""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from isoscale.data import rng
from isoscale.data.batches import Batch, to_device
from isoscale.data.rng import StepRandom
from isoscale.engine.build import place
from isoscale.engine.diagnose.trace import Origin, Part, Tracer
from isoscale.engine.metrics.accumulators import Recorder
from isoscale.engine.precision import Precision
from isoscale.engine.state.registry import copy_weights
from isoscale.engine.state.tensor_files import save_tensors
from isoscale.engine.step.context import StepContext
from isoscale.engine.step.step import loss_terms
from isoscale.parallel.serialize import put_together, take_apart
from isoscale.system import devices as accelerators
from isoscale.system.files import own_folder

if TYPE_CHECKING:
    from isoscale.engine.trainer import Trainer

SCRIPT = '''"""Step {step} of the run again, as far as it broke down: start this where the run was started."""

from pathlib import Path

from isoscale.engine.diagnose.reproducer import Case
from isoscale.recipe.components import instantiate, task_spec
from isoscale.recipe.load import load_recipe

folder = Path(__file__).resolve().parent
recipe = load_recipe(folder.parents[1] / "recipe.yaml").recipe
task = instantiate(task_spec(recipe.task))  # a task that was given in Python: make it here instead

with Case(folder, task) as case:  # loads the weights and the batch, and watches every operation
    output = task.training_step(case.batch, case.batch_idx)
    case.backward(output)

print(case.words())
'''


def write_reproducer(
    folder: Path, engine: "Trainer", part: Part, weights: dict[str, Tensor], number: int, report: dict[str, Any]
) -> None:
    """Write the files of a step; `number` is counted from 0, as randomness counts."""
    own_folder(folder.parent)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tensors: dict[str, Tensor] = {}
    structure = take_apart(part.batch, "batch", tensors, _left_out)
    samples = part.samples.detach().cpu().contiguous()
    save_tensors({**_separate(tensors), "samples": samples}, folder / "batch.safetensors")
    save_tensors(_separate(weights), folder / "weights.safetensors")
    needed = {
        "batch": structure, "batch_idx": part.batch_idx, "number": number, "seed": engine.settings.seed,
        "steps_per_epoch": engine.train.plan.steps_per_epoch, "device": engine.decided.device,
        "precision": engine.decided.precision,
    }  # fmt: skip
    (folder / "report.json").write_text(json.dumps({**report, "needed": needed}, indent=1))
    (folder / "reproduce.py").write_text(SCRIPT.format(step=number + 1))


class Case:
    """A task in the step that broke down, under a watch."""

    def __init__(self, folder: Path, task: nn.Module) -> None:
        """Bring a task with the weights of `folder` to the device that the run had, if it is here."""
        self._needed = json.loads((folder / "report.json").read_text())["needed"]
        kind = self._needed["device"]
        found = accelerators.find(kind if kind == "cpu" or getattr(torch, kind).is_available() else "auto")
        self._precision = Precision(self._needed["precision"], found.kind)
        self._task = task
        place(task, found, self._precision, False, lambda text: None)
        copy_weights(task, load_file(folder / "weights.safetensors"))
        tensors = load_file(folder / "batch.safetensors")
        self._samples = tensors.pop("samples").to(found.device)
        self.batch: Batch = to_device(put_together(self._needed["batch"], tensors), found.device)
        self.batch_idx: int = self._needed["batch_idx"]
        self._context = StepContext("train", task, Recorder(found.device))
        self._watch = Tracer(task)

    def __enter__(self) -> "Case":
        """Everything around the step as it was: precision, randomness, `self.log`."""
        random = StepRandom(self._needed["seed"])
        random.steps_per_epoch = self._needed["steps_per_epoch"]
        random.step, random.samples = self._needed["number"], self._samples
        self._context.enter()
        with ExitStack() as stack:
            stack.callback(self._context.leave)
            stack.enter_context(self._precision.applied())
            stack.enter_context(rng.use(random))
            stack.enter_context(self._watch)
            stack.enter_context(self._precision.autocast())
            self._watch.begin(self.batch, self._samples)
            self._watch.mark("data")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        """The step is over."""
        self._stack.close()

    def backward(self, output: Any) -> None:
        """The backward pass of what a training step returned."""
        means = [pair.mean for pair in loss_terms(output, self._samples.shape[0]).values()]
        self._watch.look_at(means)
        self._watch.mark("forward")
        torch.stack(means).sum().backward()
        self._watch.look_at(parameter.grad for parameter in self._task.parameters())

    @property
    def found(self) -> Origin | None:
        """Where the first loss or gradient comes from that is not finite."""
        return self._watch.blamed

    def words(self) -> str:
        """What was found, in words."""
        return str(self.found) if self.found else "everything was finite this time"


def _left_out(value: Any, name: str) -> Any:
    """What a file cannot hold of a batch is None in the script."""
    is_held = isinstance(value, Tensor | np.ndarray | np.generic | dict | list | tuple | set | frozenset)
    return None if is_held else {"value": None}


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors takes them: on the host, none in the memory of another."""
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
