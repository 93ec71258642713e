"""The graphed program on a real CUDA device: what is replayed has the bits of what is run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import isoscale
from isoscale.data.mixture import Mixture
from isoscale.data.order import Order
from isoscale.data.rng import StepRandom
from isoscale.errors import UserError
from isoscale.runs.open import Given, open_run
from isoscale.runs.session import Session
from isoscale.science.images import Crop, Cutout, Flip, Rotate
from isoscale.science.models import MLP

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BASE: dict[str, Any] = {
    "data": {"batch_size": 64},
    "train": {"steps": 230, "epochs": None, "precision": "32"},
    "schedule": {"name": "cosine", "warmup": 10},
    "observe": {"every": 20, "tensorboard": 0, "level": "warning"},
    "checkpoint": {"every": "never"},
}


def merged(*recipes: dict[str, Any]) -> dict[str, Any]:
    """Recipes laid over each other, section by section."""
    whole: dict[str, Any] = {}
    for recipe in recipes:
        for section, values in recipe.items():
            whole[section] = {**whole.get(section, {}), **values} if isinstance(values, dict) else values
    return whole


def network(dropout: float = 0.0, norm: bool = False, width: int = 32) -> nn.Module:
    torch.manual_seed(1)
    middle = [nn.BatchNorm1d(width)] if norm else []
    return nn.Sequential(nn.Linear(13, width), *middle, nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 5))


def data(num_samples: int = 1000) -> isoscale.Sources:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_samples, 13, generator=generator)
    labels = torch.randint(0, 5, (num_samples,), generator=generator)
    return isoscale.Sources(train={"input": rows, "target": labels}, val={"input": rows[:100], "target": labels[:100]})


def task(**options: Any) -> isoscale.Supervised:
    return isoscale.Supervised(network(**options), "cross_entropy", ["accuracy"])


def fit(path: Path, recipe: dict[str, Any], made: nn.Module | None = None) -> isoscale.Run:
    return isoscale.Trainer(recipe, run=path).fit(made or task(), data())


def sha(run: isoscale.Run) -> str:
    return run.summary()["weights_sha256"]


def program(run: isoscale.Run) -> str:
    return run.record["decided"]["program"]


def timeless(run: isoscale.Run) -> dict[str, list[tuple[int, float]]]:
    return {name: run.history(name) for name in run.metrics if not name.startswith("time/")}


class Augmenting(isoscale.Supervised):
    """Augments in its training step, inside the capture."""

    def __init__(self, change: Any) -> None:
        super().__init__(nn.Sequential(nn.Flatten(), nn.Linear(192, 5)), "cross_entropy")
        self._change = change

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        changed = self._change(batch)
        return super().training_step({**changed, "input": changed["input"] / 255}, batch_idx)


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "dropout": ({}, {"dropout": 0.3}),
    "batch norm": ({}, {"norm": True}),
    "clipping": ({"train": {"clip": 0.5}}, {}),
    "moving average": ({"train": {"ema": 0.99}}, {}),
    "accumulation": ({"train": {"accumulate": 2}}, {}),
    "tree": ({"parallel": {"reduce": "tree"}}, {"dropout": 0.2, "norm": True}),
    "host residency": ({"data": {"residency": "host"}}, {"dropout": 0.2}),
    "momentum": ({"optimizer": {"name": "sgd", "momentum": 0.9, "lr": 0.05}}, {}),
    "adamw": ({"optimizer": {"name": "adamw", "weight_decay": 0.1}}, {}),
    "rmsprop": ({"optimizer": {"name": "rmsprop"}}, {}),
    "bf16": ({"train": {"precision": "bf16"}}, {}),
    "fp16": ({"train": {"precision": "fp16"}}, {}),
    "tf32": ({"train": {"precision": "tf32"}}, {}),
    "parameters in pieces": ({}, {"width": 3000}),
    "momentum in pieces": ({"optimizer": {"name": "sgd", "momentum": 0.9, "lr": 0.05}}, {"width": 3000}),
    "float64": ({"train": {"precision": "64"}}, {}),
    "groups": ({"optimizer": {"name": "sgd", "groups": [{"match": ["*.bias"], "lr_scale": 4.0}]}}, {}),
    "loss weights": ({"train": {"loss_weights": {"loss": {"start": 0.1, "end": 2.0}}}}, {}),
    "loss weights in steps": (
        {
            "train": {
                "loss_weights": {
                    "loss": {
                        "name": "step",
                        "start": 0.1,
                        "values": [{"at": 50, "value": 2.0}, {"at": "8 epochs", "value": 0.5}],
                    }
                }
            }
        },
        {},
    ),
    "loss weights per epoch": (
        {
            "train": {
                "loss_weights": {
                    "loss": {
                        "name": "cosine",
                        "start": 2.0,
                        "end": 0.0,
                        "every": "epoch",
                    }
                }
            }
        },
        {},
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_graphed_equals_eager_to_the_bit_over_230_steps(name: str, tmp_path: Path) -> None:
    recipe, options = VARIANTS[name]
    eager = fit(tmp_path / "eager", merged(BASE, recipe, {"train": {"program": "eager"}}), task(**options))
    graphed = fit(tmp_path / "graphed", merged(BASE, recipe, {"train": {"program": "graphed"}}), task(**options))
    assert sha(graphed) == sha(eager)
    assert timeless(graphed) == timeless(eager)


def test_a_compiled_step_is_captured_with_a_smaller_last_batch(tmp_path: Path) -> None:
    """What the smaller batch needs is compiled before it is captured: 1000 samples are 15 batches and 40 samples."""
    recipe = merged(BASE, {"train": {"steps": 80, "program": "compiled+graphed"}})
    made = isoscale.Supervised(MLP([13, 400, 400, 5]), "cross_entropy")
    run = fit(tmp_path / "run", recipe, made)
    assert program(run) == "compiled+graphed"
    assert run.summary()["step"] == 80


@pytest.mark.parametrize("change", [Flip(), Flip("alternate"), Crop(1), Crop(1, "reflect"), Cutout(2), Rotate(20)])
def test_a_captured_step_augments_as_an_eager_one(change: Any, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 255, (300, 3, 8, 8), dtype=torch.uint8, generator=generator)
    sources = isoscale.Sources(train={"input": images, "target": torch.arange(300) % 5})
    hashes = set()
    for name in ("eager", "graphed"):
        torch.manual_seed(0)
        recipe = merged(BASE, {"train": {"program": name, "steps": 60}})
        made = Augmenting(change)
        hashes.add(sha(isoscale.Trainer(recipe, run=tmp_path / name).fit(made, sources)))
    assert len(hashes) == 1


@pytest.mark.parametrize("every", [1, 20])
def test_a_profile_of_captured_steps_counts_every_step_by_the_device(every: int, tmp_path: Path) -> None:
    plain = fit(tmp_path / "plain", merged(BASE, {"train": {"program": "graphed"}}))
    recipe = merged(BASE, {"train": {"program": "graphed", "steps_per_launch": every}})
    session = Session(open_run(recipe, {}, tmp_path / "run", Given(task(), data()), profile=True))
    session.train()
    run = isoscale.Run(tmp_path / "run")
    actions = {action["name"]: action for action in run.record["profile"]}
    phases = ("data", "forward", "backward", "optimizer")
    # the rehearsal of a launch runs its steps both ways, and counts those that were kept
    assert [actions[name]["calls"] for name in phases] == [230] * 4
    total = actions["total"]["seconds"]
    assert 0 < sum(actions[name]["seconds"] for name in phases) < total
    assert sum(action["seconds"] for action in actions.values()) - total == pytest.approx(total, rel=0.05)
    assert (tmp_path / "run" / "profile" / "trace.json").stat().st_size > 1000
    assert sha(run) == sha(plain)


def test_what_is_shown_does_not_change_a_captured_training(tmp_path: Path) -> None:
    recipe = merged(BASE, {"train": {"program": "graphed"}})
    plain = fit(tmp_path / "plain", recipe)
    shown = fit(tmp_path / "shown", merged(recipe, {"observe": {"tensorboard": 2}}))
    assert sha(plain) == sha(shown)


def test_rates_are_those_of_the_device(tmp_path: Path) -> None:
    """The device's work is issued far ahead; the rate of a window must not be that of issuing it."""
    recipe = merged(BASE, {"train": {"program": "eager"}, "observe": {"every": 7}})
    rates = [rate for _, rate in fit(tmp_path, recipe).history("time/samples_per_second")][5:]
    assert max(rates) < 20 * sorted(rates)[len(rates) // 2]


def systems() -> isoscale.Sources:
    """Two systems whose samples have shapes of their own."""
    generator = torch.Generator().manual_seed(0)
    made = [
        {
            "input": torch.randn(count, atoms, 13, generator=generator),
            "target": torch.randn(count, 5, generator=generator),
        }
        for count, atoms in ((50, 3), (34, 7))
    ]
    return isoscale.Sources(train=Mixture(made, "size"), val=Mixture(made))


class Pooled(isoscale.Supervised):
    """Takes any number of atoms."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self.model(batch["input"]).mean(1) - batch["target"]).square().mean()

    validation_step = training_step


@pytest.mark.parametrize("residency", ["device", "host"])
def test_a_mixture_is_captured_system_by_system(residency: str, tmp_path: Path) -> None:
    hashes = set()
    for name in ("eager", "graphed"):
        given = {"train": {"program": name, "steps": 120}, "data": {"batch_size": [8, 5], "residency": residency}}
        recipe = merged(BASE, given)
        run = isoscale.Trainer(recipe, run=tmp_path / name).fit(Pooled(network(dropout=0.1)), systems())
        hashes.add(sha(run))
    assert len(hashes) == 1


def test_a_fitted_scale_is_read_inside_a_captured_step(tmp_path: Path) -> None:
    transforms = [{"class": "scale"}]
    hashes = set()
    for name in ("eager", "graphed"):
        recipe = merged(BASE, {"train": {"program": name}, "data": {"transforms": transforms}})
        hashes.add(sha(fit(tmp_path / name, recipe)))
    assert len(hashes) == 1


UNITS = {
    "scale": {"class": "scale", "key": "target"},
    "normalize": {"class": "normalize", "mean": [100, 90], "std": [10, 5], "key": "target"},
    "divide": {"class": "divide", "by": 7, "key": "target"},
}


@pytest.mark.parametrize("residency", ["device", "host"])
@pytest.mark.parametrize("names", [["scale"], ["normalize"], ["divide", "scale"]], ids="-".join)
def test_metrics_are_in_stored_units_inside_a_captured_step(names: list[str], residency: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(1000, 13, generator=generator)
    whole = {"input": rows, "target": 100 + 10 * rows[:, :2]}
    found = []
    for name in ("eager", "graphed"):
        torch.manual_seed(1)
        made = isoscale.Supervised(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(13, 2)), "mse", ["mae"])
        section = {"transforms": [UNITS[each] for each in names], "residency": residency}
        recipe = merged(BASE, {"train": {"program": name}, "data": section})
        run = isoscale.Trainer(recipe, run=tmp_path / name).fit(made, isoscale.Sources(train=whole))
        assert program(run) == name
        found.append((sha(run), run.history("train/mae"), run.history("train/loss")))
    assert found[0] == found[1]
    assert run.metrics["train/mae"] > 1, "in the units of the data, whose deviation is 10"
    predicted = isoscale.predict(run, data=rows)["prediction"]
    assert float((predicted - whole["target"]).abs().mean()) == pytest.approx(run.metrics["train/mae"], rel=0.3)


def test_the_number_of_steps_a_launch_does_not_matter(tmp_path: Path) -> None:
    hashes = set()
    for count in (1, 7, 10, 50):
        recipe = merged(BASE, {"train": {"program": "graphed", "steps_per_launch": count}})
        hashes.add(sha(fit(tmp_path / str(count), recipe, task(dropout=0.1))))
    assert len(hashes) == 1


def test_auto_captures_an_ordinary_task(tmp_path: Path) -> None:
    run = fit(tmp_path, BASE)
    assert program(run) == "graphed"
    assert "not graphed" not in (tmp_path / "log.txt").read_text()


def test_a_captured_run_that_was_stopped_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    recipe = merged(BASE, {"train": {"program": "graphed"}, "schedule": {"name": "constant"}})
    whole = fit(tmp_path / "whole", recipe, task(dropout=0.2))
    fit(tmp_path / "parts", merged(recipe, {"train": {"steps": 93}}), task(dropout=0.2))
    parts = fit(tmp_path / "parts", recipe, task(dropout=0.2))
    assert sha(parts) == sha(whole)


def test_order_and_randomness_are_the_same_on_the_device_as_on_the_host() -> None:
    for num_samples in (1, 5, 1797, 60_000, 10**12):
        order = Order(num_samples, 3)
        assert torch.equal(order.indices(17, 5000, "cuda").cpu(), order.indices(17, 5000))
    found = []
    for device in ("cpu", "cuda"):
        random = StepRandom(7)
        random.step, random.samples = 12, torch.arange(100, device=device) * 10**9
        found.append(random.uniform("noise", (3, 5)).cpu())
    assert torch.equal(*found)


class Waiting(isoscale.Supervised):
    """Looks at a value on the host."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch["input"].sum().item() > 1e9:
            raise ValueError
        return super().training_step(batch, batch_idx)


class Replacing(isoscale.Supervised):
    """Replaces a buffer instead of updating it."""

    def __init__(self, model: nn.Module, loss: str) -> None:
        super().__init__(model, loss)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen = self.seen + 1
        return super().training_step(batch, batch_idx)


class Counting(isoscale.Supervised):
    """Lets the number of the batch, which a replay does not see, change the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return isoscale.WeightedSum(loss.sum * (1 + batch_idx % 3), loss.weight)


REFUSED = [(Waiting, "captur"), (Replacing, "in place"), (Counting, "batch_idx")]


@pytest.mark.parametrize(("cls", "why"), REFUSED)
def test_what_cannot_be_captured_runs_eagerly_with_a_line_that_says_why(cls: Any, why: str, tmp_path: Path) -> None:
    auto = fit(tmp_path / "auto", BASE, cls(network(), "cross_entropy"))
    eager = fit(tmp_path / "eager", merged(BASE, {"train": {"program": "eager"}}), cls(network(), "cross_entropy"))
    assert sha(auto) == sha(eager)
    assert program(auto) == "eager"
    line = next(line for line in (tmp_path / "auto" / "log.txt").read_text().splitlines() if "not graphed" in line)
    assert why in line


def test_a_capture_that_was_demanded_and_is_impossible_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="batch_idx"):
        fit(tmp_path, merged(BASE, {"train": {"program": "graphed"}}), Counting(network(), "cross_entropy"))


def test_a_nan_latches_and_is_reported(tmp_path: Path) -> None:
    rows = torch.randn(1000, 13)
    rows[500] = float("nan")
    poisoned = isoscale.Sources(train={"input": rows, "target": torch.randint(0, 5, (1000,))})
    made = task()
    with pytest.raises(UserError, match="NaN or infinite"):
        isoscale.Trainer(merged(BASE, {"train": {"program": "graphed"}}), run=tmp_path).fit(made, poisoned)
    assert all(bool(parameter.isfinite().all()) for parameter in made.parameters())


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
@pytest.mark.parametrize("policy", ["skip", "zero", "rollback"])
def test_steps_that_are_not_finite_are_left_out_of_captured_launches_too(
    policy: str, optimizer: str, tmp_path: Path
) -> None:
    rows = data()
    rows.train.tensors["input"][517] = float("nan")  # the first hundred are evaluated too
    choice = {
        "train": {"nan": policy, "ema": 0.9},
        "optimizer": {"name": optimizer},
        "checkpoint": {"every": "50 steps"},
    }
    runs = []
    for program_name in ("eager", "graphed"):
        recipe = merged(BASE, choice, {"train": {"program": program_name, **choice["train"]}})
        made = isoscale.Trainer(recipe, run=tmp_path / program_name).fit(task(norm=True), rows)
        runs.append(made)
    assert sha(runs[0]) == sha(runs[1])
    assert timeless(runs[0]) == timeless(runs[1])
    assert sum(value for _, value in runs[1].history("train/not_finite")) > 0
