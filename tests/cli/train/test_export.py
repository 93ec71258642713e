import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import isoscale as package
from isoscale.engine.state.checkpoint import read_weights
from isoscale.runs.export import export, load_task


def inputs(run: Path) -> torch.Tensor:
    """Three samples as the network of the run takes them."""
    return torch.rand(3, 64, generator=torch.Generator().manual_seed(0))


def test_the_weights_are_those_of_the_checkpoint_and_the_file_says_what_it_is(isoscale, copied):
    run = copied()
    written = isoscale("export", str(run), "--out", "digits.safetensors")
    assert written.code == 0
    assert written.out.startswith(f"{run}, best checkpoint, step 46: written to digits.safetensors\n")
    wanted = read_weights(package.Run(run).checkpoint())
    with safe_open("digits.safetensors", "pt") as file:
        said = file.metadata()
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert (said["step"], said["isoscale"]) == ("46", package.__version__)
    assert json.loads(said["recipe"])["task"]["class"] == "classifier"


def test_a_file_of_weights_becomes_the_task_again(isoscale, copied):
    run = copied()
    isoscale("export", str(run), "--out", "digits.safetensors")
    wanted, found = package.Run(run).model(), load_task(Path("digits.safetensors")).model
    torch.testing.assert_close(found(inputs(run)), wanted(inputs(run)), rtol=0, atol=0)


def test_another_checkpoint_can_be_written(isoscale, copied):
    run = copied()
    assert isoscale("export", str(run), "--checkpoint", "23", "--out", "a.safetensors").code == 0
    with safe_open("a.safetensors", "pt") as file:
        assert file.metadata()["step"] == "23"


@pytest.mark.parametrize("file", ["digits.pt", pytest.param("digits.pt2", marks=pytest.mark.slow)])
def test_a_network_does_the_same_in_a_file_on_any_number_of_samples(isoscale, copied, file):
    run = copied()
    written = isoscale("export", str(run), "--out", file)
    assert written.code == 0 and '"batch", 64' in written.out and "Divide, Flatten" in written.out
    said = {"input_shape": ""}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if file.endswith("2"):
            loaded: Any = torch.export.load(file, extra_files=said).module()
        else:
            loaded = torch.jit.load(file, _extra_files=said)
    wanted = package.Run(run).model()(inputs(run))
    torch.testing.assert_close(loaded(inputs(run)), wanted)
    assert "batch" in str(said["input_shape"])


@pytest.mark.parametrize(
    ("out", "message"), [("a.onnx", r"\.safetensors, \.pt, \.pt2"), ("no/a.pt", "there is no folder no")]
)
def test_a_file_that_cannot_be_written_is_refused(isoscale, copied, out, message):
    refused = isoscale("export", str(copied()), "--out", out)
    assert refused.code == 2 and re.search(message, refused.err) and refused.out == ""


class Moody(nn.Module):
    """Does something else for each number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.layer(input) * (2 if len(input) > 2 else 1)


class Own(package.Task):
    """A task of somebody's own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(2, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(batch["input"]).square().mean()


class Deployable(Own):
    """A task that says what it is elsewhere."""

    def deployed(self) -> nn.Module:
        return nn.Sequential(self.model, nn.Tanh())


def trained(task: package.Task, folder: Path) -> package.Run:
    data = {"input": torch.rand(8, 2), "target": torch.rand(8, 1)}
    quiet = {"observe.level": "error", "observe.tensorboard": 0, "train.epochs": 1, "data.batch_size": 4}
    return package.Trainer(run=folder, **quiet).fit(task, data)


def test_a_network_that_a_file_cannot_hold_is_refused_with_what_can_be_written(tmp_path):
    run = trained(package.Supervised(Moody()), tmp_path / "run")
    with pytest.raises(package.UserError, match=r"other things in the file[\s\S]*FILE\.safetensors"):
        export(run, tmp_path / "a.pt")
    assert not list(tmp_path.glob("*a.pt*"))
    export(run, tmp_path / "a.safetensors")


def test_a_task_of_ones_own_says_what_is_written(tmp_path):
    with pytest.raises(package.UserError, match=r"Own does not say what it is .* a method `deployed`"):
        export(trained(Own(), tmp_path / "own"), tmp_path / "own.pt")
    run = trained(Deployable(), tmp_path / "run")
    export(run, tmp_path / "a.pt")
    samples = torch.rand(5, 2)
    torch.testing.assert_close(torch.jit.load(tmp_path / "a.pt")(samples), run.model()(samples).tanh())
