"""Weights from elsewhere: other names, other files, other networks."""

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import isoscale
from isoscale.engine.state.checkpoint import read_weights
from isoscale.errors import UserError
from isoscale.recipe.schema import InitFrom
from isoscale.runs.init_from import load_weights, start_from
from isoscale.science.images import Classifier, ResNet
from tests import warm
from tests.helpers import cli, train

SHAPES = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
NUM_PARAMETERS = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032}


def norm(name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from ((f"{name}.{part}", (width,)) for part in ("weight", "bias", "running_mean", "running_var"))
    yield f"{name}.num_batches_tracked", ()


def block(name: str, num_in: int, width: int, stride: int, deep: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A residual block as torchvision writes it."""
    num_out = 4 * width if deep else width
    plain = [(num_in, width, 3), (width, width, 3)]
    bottleneck = [(num_in, width, 1), (width, width, 3), (width, num_out, 1)]
    for number, (before, after, kernel) in enumerate(bottleneck if deep else plain, start=1):
        yield f"{name}.conv{number}.weight", (after, before, kernel, kernel)
        yield from norm(f"{name}.bn{number}", after)
    if stride != 1 or num_in != num_out:
        yield f"{name}.downsample.0.weight", (num_out, num_in, 1, 1)
        yield from norm(f"{name}.downsample.1", num_out)


def torchvision_shapes(depth: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes in torchvision's files of weights, trained on ImageNet."""
    yield "conv1.weight", (64, 3, 7, 7)
    yield from norm("bn1", 64)
    num_in, deep = 64, depth >= 50
    for stage, num_blocks in enumerate(SHAPES[depth]):
        width = 64 * 2**stage
        for number in range(num_blocks):
            stride = 2 if stage > 0 and number == 0 else 1
            yield from block(f"layer{stage + 1}.{number}", num_in, width, stride, deep)
            num_in = 4 * width if deep else width
    yield "fc.weight", (1000, num_in)
    yield "fc.bias", (1000,)


@pytest.mark.parametrize("depth", SHAPES)
def test_our_residual_networks_have_the_names_and_shapes_of_torchvision(depth: int):
    with torch.device("meta"):
        network = ResNet(depth, num_classes=1000, stem="imagenet")
    found = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    assert found == dict(torchvision_shapes(depth))
    assert sum(parameter.numel() for parameter in network.parameters()) == NUM_PARAMETERS[depth]


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def random_weights(module: nn.Module) -> dict[str, Tensor]:
    """Weights that no initialisation makes, by the module's own names."""
    return {name: torch.rand_like(tensor.float()).to(tensor.dtype) for name, tensor in module.state_dict().items()}


def begin(task: nn.Module, path: Path, *exclude: str) -> list[str]:
    """Start from a file; what was said."""
    notes: list[str] = []
    start_from(InitFrom(run=str(path), exclude=list(exclude)), task, notes.append)
    return notes


def save(weights: object, path: Path) -> Path:
    torch.save(weights, path)
    return path


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("model.", None),
        ("", '"model." is put before their names'),
        ("module.", '"module.", with which their names begin, becomes "model."'),
        ("module.model.", '"module.", with which their names begin, is left out'),
        ("net._orig_mod.", '"net._orig_mod.", with which their names begin, becomes "model."'),
    ],
)
def test_names_of_others_are_fitted_and_that_is_said(before: str, words: str | None, tmp_path: Path):
    task, weights = isoscale.Supervised(small()), random_weights(small())
    notes = begin(task, save({before + name: tensor for name, tensor in weights.items()}, tmp_path / "weights.pt"))
    assert notes == ([] if words is None else [f"weights of {tmp_path / 'weights.pt'}: {words}"])
    assert all(torch.equal(tensor, weights[name]) for name, tensor in task.model.state_dict().items())


def test_a_task_without_a_model_inside_takes_the_weights_of_one_with(tmp_path: Path):
    weights = random_weights(small())
    task = small()
    (note,) = begin(task, save({f"model.{name}": tensor for name, tensor in weights.items()}, tmp_path / "weights.pt"))
    assert note.endswith('"model.", with which their names begin, is left out')
    assert all(torch.equal(tensor, weights[name]) for name, tensor in task.state_dict().items())


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model"])
def test_weights_are_found_in_files_that_hold_more(key: str, tmp_path: Path):
    weights = random_weights(small())
    path = save({"epoch": 3, key: weights, "optimizer": {"state": {}}}, tmp_path / "last.ckpt")
    assert load_weights(str(path)).keys() == weights.keys()


def test_old_files_need_not_count_batches(tmp_path: Path):
    task = isoscale.Supervised(small())
    weights = {name: value for name, value in random_weights(small()).items() if "num_batches" not in name}
    begin(task, save(weights, tmp_path / "old.pth"))
    assert torch.equal(task.model[1].running_var, weights["1.running_var"])
    assert task.model[1].num_batches_tracked == 0


def test_a_tensor_that_stands_under_two_names_in_a_file_is_taken_once(tmp_path: Path):
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    path = save({name: torch.ones_like(tensor) for name, tensor in tied.state_dict().items()}, tmp_path / "tied.pt")
    begin(task := isoscale.Supervised(tied), path)
    assert torch.equal(task.model[1].weight, torch.ones(3, 3))


def test_a_new_last_layer_is_proposed_and_what_is_proposed_works(tmp_path: Path):
    weights = random_weights(ResNet(18, 1000, "imagenet"))
    path = save(weights, tmp_path / "resnet18.pth")
    task = Classifier(ResNet(18, 10, "imagenet"))
    with pytest.raises(UserError) as caught:
        begin(task, path)
    assert "model.fc.weight is (1000, 512), expected (10, 512), model.fc.bias is (1000,), exp" in str(caught.value)
    (proposed,) = shlex.split(str(caught.value).rpartition("as initialised: ")[2])
    assert proposed == f"task.init_from={{run: {path}, exclude: [model.fc.*]}}"
    fresh = task.model.fc.weight.clone()
    assert begin(task, path, "model.fc.*") == [f'weights of {path}: "model." is put before their names']
    assert torch.equal(task.model.fc.weight, fresh)
    assert torch.equal(task.model.layer4[1].bn2.running_var, weights["layer4.1.bn2.running_var"])


@pytest.mark.slow
def test_weights_of_another_network_are_named_and_counted(tmp_path: Path):
    path = save(random_weights(ResNet(34, 10)), tmp_path / "resnet34.pth")
    with pytest.raises(UserError) as caught:
        begin(Classifier(ResNet(50, 10)), path)
    text = str(caught.value)
    assert "no weights for model.layer1.0.conv3.weight, model.layer1.0.bn3.weight" in text
    assert "… (85 in all)" in text and "unexpected" not in text and "exclude" not in text
    assert "model.layer1.0.conv1.weight is (64, 64, 3, 3), expected (64, 64, 1, 1)" in text
    assert text.count("bn3") <= 8


def test_what_a_file_has_besides_can_be_excluded_by_its_name_there(tmp_path: Path):
    weights = {f"net.{name}": tensor for name, tensor in random_weights(small()).items()}
    path = save({**weights, "criterion.weight": torch.ones(2)}, tmp_path / "module.ckpt")
    task = isoscale.Supervised(small())
    with pytest.raises(UserError, match=r"fit the model: unexpected criterion.weight\n(.*)exclude: \[criterion.\*\]"):
        begin(task, path)
    begin(task, path, "criterion.*")
    assert torch.equal(task.model[0].weight, weights["net.0.weight"])


@pytest.mark.parametrize(
    ("exclude", "words"),
    [
        ("modle.2.*", 'no weight is called "modle.2.*"; did you mean "model.2.*"?'),
        ("*", "nothing is left to start from"),
    ],
)
def test_an_exclusion_of_nothing_or_of_everything_is_a_mistake(exclude: str, words: str, tmp_path: Path):
    path = save(random_weights(small()), tmp_path / "weights.pt")
    with pytest.raises(UserError) as caught:
        begin(isoscale.Supervised(small()), path, exclude)
    assert words in str(caught.value)


@pytest.mark.parametrize("what", ["arguments", "module"])
@pytest.mark.slow
def test_a_file_that_holds_objects_is_refused_with_a_command_that_works(what: str, tmp_path: Path):
    network = small()
    more = {"state_dict": network.state_dict(), "hyper_parameters": argparse.Namespace(width=4)}
    path = save(more if what == "arguments" else network, tmp_path / "it's.ckpt")
    with pytest.raises(UserError) as caught:
        load_weights(str(path))
    lines = str(caught.value).splitlines()
    assert "holds more than weights" in lines[0] and ("Namespace" in lines[0] or "Sequential" in lines[0])
    command = [sys.executable, *shlex.split(lines[2])[1:]]
    warm.run(command, cwd=tmp_path, check=True)
    assert load_weights(str(tmp_path / "weights.pt")).keys() == network.state_dict().keys()


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 half of an archive"])
def test_what_is_no_file_of_weights_is_said_to_be_none(content: bytes, tmp_path: Path):
    path = tmp_path / "weights.pt"
    path.write_bytes(content)
    with pytest.raises(UserError, match="it is damaged, or no file of torch or safetensors"):
        load_weights(str(path))


def test_a_checkpoint_of_lightning_starts_a_run(tmp_path: Path):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))

        def training_step(self, batch, batch_idx):
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    data = torch.utils.data.TensorDataset(torch.ones(4, 64))
    trainer = lightning.Trainer(
        max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(data))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    keys = {"task__model": {"class": "mlp", "widths": [64, 8, 10]}, "train__steps": 1, "optimizer__lr": 1e-30}
    run = train(tmp_path / "run", task__init_from=str(tmp_path / "last.ckpt"), **keys)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(read_weights(run.checkpoint("last"))["model.layers.2.bias"], saved["net.2.bias"])
    assert '"net.", with which their names begin, becomes "model.layers."' in (run.path / "log.txt").read_text()


@pytest.mark.slow
def test_a_command_that_starts_from_a_plain_file_says_so_and_one_that_cannot_leaves_nothing(tmp_path: Path):
    network = nn.Module()
    network.layers = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    save(network.state_dict(), tmp_path / "plain.pt")
    words = ("train", "task.init_from=plain.pt", "train.steps=2", "--run", "run")
    done = cli(*words, "task.model={class: mlp, widths: [64, 8, 10]}", cwd=tmp_path)
    assert done.returncode == 0 and 'weights of plain.pt: "model." is put before their names' in done.stdout
    refused = cli(*words[:-1], "other", "task.model={class: mlp, widths: [64, 8, 5, 10]}", cwd=tmp_path)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr and not (tmp_path / "other").exists()
