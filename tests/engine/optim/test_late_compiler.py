"""A training that compiles nothing does not wait for torch's compiler; one that does has it as torch would."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TRAINED = """
import sys
import isoscale
keys = {"train.steps": 3, "observe.tensorboard": 0, "observe.level": "error"}
isoscale.train("images/digits", run="run", **keys)
print("torch._dynamo" in sys.modules)
"""
OPTIMIZERS = """
import json, sys
import torch
from isoscale.engine.optim.late_compiler import put_off_compiler

def weights(name):
    torch.manual_seed(0)
    network = torch.nn.Linear(3, 3)
    optimizer = getattr(torch.optim, name)([{"params": [network.weight]}], lr=0.1)
    for _ in range(3):
        def closure():
            optimizer.zero_grad()
            loss = network(torch.ones(2, 3)).square().sum()
            loss.backward()
            return loss
        optimizer.step(closure)
        optimizer.load_state_dict(optimizer.state_dict())
    assert network.weight.grad_fn is None and torch.is_grad_enabled()
    return network.weight.tolist()

names = {cls.__name__ for cls in vars(torch.optim).values() if isinstance(cls, type)} - {"Optimizer", "SparseAdam"}
put_off_compiler()
put_off_compiler()
early = {name: weights(name) for name in names}
was_imported = "torch._dynamo" in sys.modules
import torch._dynamo
late = {name: weights(name) for name in names}
network = torch.nn.Linear(3, 3)
optimizer = torch.optim.Adam(network.parameters())
network(torch.ones(2, 3)).sum().backward()
before = network.weight.detach().clone()
torch.compile(optimizer.step, backend="eager")()
changed = not torch.equal(before, network.weight)
print(json.dumps([early, late, was_imported, changed, torch._dynamo.utils.counters["frames"]["total"] > 0]))
"""


def printed(code: str, cwd: Path) -> str:
    """What a process that has imported nothing yet prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_a_training_that_compiles_nothing_does_not_import_the_compiler(tmp_path: Path) -> None:
    assert printed(TRAINED, cwd=tmp_path) == "False"


def test_every_optimizer_makes_the_same_steps_without_the_compiler_and_can_still_be_compiled(tmp_path: Path) -> None:
    early, late, was_imported, changed, was_compiled = json.loads(printed(OPTIMIZERS, cwd=tmp_path))
    assert early == late and len(early) >= 13
    assert not was_imported and changed and was_compiled
