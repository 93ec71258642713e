"""Terms of the loss for the band energy and the density of states of whole snapshots."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import isoscale
from isoscale.data.transforms import Scale
from isoscale.errors import UserError
from isoscale.science.electronic import Ldos, Snapshots
from isoscale.science.electronic.integrals import EnergyGrid
from isoscale.science.electronic.loss_terms import LossTerms, make_terms, sensitivities
from tests.helpers import sha, timeless, train
from tests.ranks import train_on
from tests.science.electronic.made import (
    NUM_ATOMS,
    NUM_ELECTRONS,
    OFFSET,
    RECIPE,
    SIZE,
    SPACING,
    Physics,
    ldos,
    write,
)

GRID = EnergyGrid(SIZE, SPACING, OFFSET)
TERMS = {"metrics": ["band_energy"], "every": 1, "loss": ["band_energy", "dos"], "group": 10}
LDOS_ONLY = {**TERMS, "loss": []}
DATA: dict[str, Any] = {"data__train": ["a", "b"], "data__val": ["c"], "data__test": None, "data__numbered": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, b={"number_of_electrons_exact": 0.8 * NUM_ELECTRONS})


def source(folder: Path) -> Any:
    return Snapshots(train=["a", "b"], path=str(folder), columns=None, numbered=True).train


def trained(folder: Path, name: str, physics: dict[str, Any], **more: Any) -> isoscale.Run:
    return train(folder / name, RECIPE, data__path=str(folder), task__physics=physics, **{**DATA, **more})


def test_the_sensitivity_is_the_derivative_of_the_band_energy(folder: Path):
    found = sensitivities(source(folder), GRID)["band_energy"][0]
    for energy in range(SIZE):
        step = np.zeros(SIZE)
        step[energy] = 1e-5
        ahead, behind = (Physics(ldos(0).astype(np.float64) + sign * step).band_energy for sign in (1, -1))
        assert found[energy].item() == pytest.approx((ahead - behind) / 2e-5 / NUM_ATOMS, rel=1e-4, abs=1e-4)


def test_of_a_whole_snapshot_the_term_is_the_squared_error_of_its_band_energy(folder: Path):
    """In units of its own: whatever the error, the root of the term is a multiple of that of the energy."""
    data = source(folder)
    scale = Scale(key="target")
    scale.load({"shift": torch.zeros(SIZE), "scale": torch.linspace(0.001, 0.003, SIZE)})
    task = Ldos(torch.nn.Linear(4, SIZE), {"size": SIZE, "spacing": SPACING, "offset": OFFSET})
    terms = make_terms(["band_energy"], 60, data, GRID, task, [scale])
    true = torch.from_numpy(ldos(0).astype(np.float64).reshape(-1, SIZE))
    ratios = []
    for energy in range(3):
        off = true.clone()
        off[:, energy] += 1e-5 * torch.rand(60, generator=torch.Generator().manual_seed(energy))
        error = Physics(off.numpy()).band_energy - Physics(true.numpy()).band_energy
        scaled = scale({"target": off})["target"] - scale({"target": true})["target"]
        ratios.append((terms(scaled, torch.zeros(60, dtype=torch.long))["band_energy"].sqrt() / abs(error)).item())
    assert ratios == pytest.approx([ratios[0]] * 3, rel=0.01)


def test_means_are_taken_in_groups_and_snapshots():
    weights = torch.tensor([[1.0, 2.0], [3.0, 1.0]], dtype=torch.float64)
    terms = LossTerms({"band_energy": weights, "dos": weights}, torch.tensor([2.0, 0.5]), 3, torch.device("cpu"))
    error, which = torch.randn(8, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 0, 0, 1, 1, 1])
    scaled = weights * torch.tensor([2.0, 0.5])
    scaled = scaled / scaled.square().sum(1).mean().sqrt()
    expected = {"band_energy": 0.0, "dos": 0.0}
    for rows in ([0, 2], [1], [3, 4], [5], [6, 7]):
        mean = error[rows].double().mean(0) * scaled[which[rows[0]]]
        expected["band_energy"] += len(rows) * mean.sum().item() ** 2 / 2 / 8
        expected["dos"] += len(rows) * mean.square().sum().item() / 8
    assert {name: term.item() for name, term in terms(error, which).items()} == pytest.approx(expected)


def test_the_terms_are_logged_and_validation_is_that_of_the_points_alone(folder: Path):
    run, plain = trained(folder, "terms", TERMS, train__epochs=1), trained(folder, "plain", LDOS_ONLY, train__epochs=1)
    names = {line["name"] for line in timeless(run)}
    assert {"train/ldos", "train/band_energy", "train/dos", "val/loss"} <= names and "val/ldos" not in names
    off = {"train__loss_weights": {"band_energy": 0, "dos": 0}}
    weightless = trained(folder, "weightless", TERMS, train__epochs=1, **off)
    assert weightless.metrics["val/loss"] == pytest.approx(plain.metrics["val/loss"], rel=1e-5)
    assert run.metrics["val/loss"] != pytest.approx(plain.metrics["val/loss"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_term_whose_weight_grows_lowers_the_error_of_the_band_energy(seed: int, folder: Path):
    """On the snapshots that are trained on, in as long a training, with no larger an error at the points."""
    long = {
        "data__val": ["a", "b"], "data__batch_size": 60, "train__epochs": 200, "train__evaluate": "200 epochs",
        "schedule": {"name": "cosine"}, "checkpoint__every": "never", "seed": seed,
    }  # fmt: skip
    weights = {"train__loss_weights": {"band_energy": {"start": 0, "end": 30}}}
    without = trained(folder, "without", LDOS_ONLY, **long).metrics
    found = trained(folder, "with", {**TERMS, "loss": ["band_energy"], "group": 60}, **long, **weights).metrics
    assert found["val/band_energy"] < 0.7 * without["val/band_energy"]
    assert found["val/loss"] < 1.1 * without["val/loss"]


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"data__residency": "host"}, {"data__residency": "disk"}])
def test_where_the_data_lives_does_not_matter(change: dict[str, Any], folder: Path):
    runs = [trained(folder, "device", TERMS, data__residency="device"), trained(folder, "other", TERMS, **change)]
    assert sha(runs[0]) == sha(runs[1])


def test_micro_batches_of_whole_groups_give_the_same_loss(folder: Path, monkeypatch: pytest.MonkeyPatch):
    sizes, plain = [], LossTerms.__call__

    def noted(self: LossTerms, error: torch.Tensor, snapshots: torch.Tensor) -> Any:
        sizes.append(len(error))
        return plain(self, error, snapshots)

    monkeypatch.setattr(LossTerms, "__call__", noted)
    keys = {"train__precision": "64", "train__epochs": 2, "optimizer__name": "sgd", "observe__every": 1}
    runs = [trained(folder, f"of{count}", TERMS, train__accumulate=count, **keys) for count in (1, 2)]
    assert sizes == [20] * 12 + [10] * 24
    found = [[line["value"] for line in timeless(run)] for run in runs]
    assert found[1] == pytest.approx(found[0], rel=1e-9)


def test_half_precision_computes_the_terms_in_full(folder: Path, monkeypatch: pytest.MonkeyPatch):
    errors, plain = [], LossTerms.__call__

    def noted(self: LossTerms, error: torch.Tensor, snapshots: torch.Tensor) -> Any:
        errors.append(error.detach())
        return plain(self, error, snapshots)

    monkeypatch.setattr(LossTerms, "__call__", noted)
    runs = [trained(folder, name, TERMS, train__precision=name, train__epochs=1) for name in ("32", "bf16")]
    first = [next(line["value"] for line in timeless(run) if line["name"] == "train/dos") for run in runs]
    assert first[1] == pytest.approx(first[0], rel=0.05)
    full, half = errors[0], errors[6]
    assert len(errors) == 12 and half.dtype == full.dtype == torch.float32
    assert not torch.equal(half, full) and not torch.equal(half, half.bfloat16().float())


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["tree", "flat"])
def test_the_loss_is_the_same_on_any_number_of_ranks(reduce: str, folder: Path):
    options = {**DATA, "data__path": str(folder), "task__physics": TERMS, "parallel__reduce": reduce}
    runs = [train_on(world, folder / f"on{world}", RECIPE, **options) for world in (1, 2)]
    if reduce == "tree":
        assert sha(runs[0]) == sha(runs[1])
        assert timeless(runs[0]) == timeless(runs[1])
    else:
        found = [[line["value"] for line in timeless(run) if line["name"] == "val/loss"] for run in runs]
        assert found[1] == pytest.approx(found[0], rel=1e-3)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"data__numbered": False}, r"set data\.numbered=true"),
        ({"task__physics": {"loss": ["energy"]}}, "there is no term 'energy'; there is band_energy, dos"),
        ({"task__energies": {"size": SIZE, "spacing": 0.1, "offset": OFFSET}}, "no Fermi level on the energy grid"),
    ],
)
def test_what_is_missing_is_named(keys: dict[str, Any], words: str, folder: Path):
    options = {**DATA, "data__path": str(folder), "task__physics": TERMS, **keys}
    with pytest.raises(UserError, match=words):
        train(folder / "run", RECIPE, **options)


def test_a_snapshot_without_its_calculation_is_named(tmp_path: Path):
    write(tmp_path, a=None)
    with pytest.raises(UserError, match="band_energy needs the calculation of snapshot a: put"):
        trained(tmp_path, "run", TERMS)
