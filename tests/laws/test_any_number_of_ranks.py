"""Law 1 on several ranks: in `tree` the weights are equal to the bit, in the fast reductions to rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isoscale
from isoscale.data import rng
from isoscale.engine.state.checkpoint import read_weights
from tests.helpers import QUIET, cli, first_of, sha, timeless
from tests.ranks import fit_on, train_on

pytestmark = pytest.mark.slow

WORLDS = [2, 4]


class Noise:
    """An augmentation: keyed noise on the inputs, in training only."""

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Add it."""
        random = rng.current()
        if random is None:
            return batch
        inputs = batch["input"]
        return {**batch, "input": inputs + 0.1 * random.uniform("noise", (inputs.shape[1],)).to(inputs.dtype)}


def small_network(norm: bool = True) -> tuple[nn.Module, isoscale.Sources]:
    """91 inputs: rows that begin at odd places in memory, where matrix libraries choose other kernels."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(517, 91, generator=generator)
    targets = inputs[:, :3].tanh() + 0.01 * torch.randn(517, 3, generator=generator)
    layers = [nn.Linear(91, 40), *([nn.BatchNorm1d(40)] if norm else []), nn.ReLU(), nn.Dropout(0.2), nn.Linear(40, 3)]
    data = isoscale.Sources(
        train={"input": inputs[:411], "target": targets[:411]}, val={"input": inputs[411:], "target": targets[411:]}
    )
    return isoscale.Supervised(nn.Sequential(*layers), loss="mse"), data


def without_norm() -> tuple[nn.Module, isoscale.Sources]:
    """The same without batch norm."""
    return small_network(norm=False)


ODD = {
    "data__batch_size": 121, "train__epochs": 2, "observe__every": 2, "train__clip": 0.5, "schedule__name": "cosine",
    "data__transforms": [{"class": f"{__name__}.Noise"}],
}  # fmt: skip
"""Four batches per epoch, the last of 48 samples; shards of 15 and 16 rows, and of 6."""
VARIANTS: dict[str, dict[str, Any]] = {
    "fused Adam": {"optimizer__name": "adam"},
    "momentum": {"optimizer__name": "sgd", "optimizer__momentum": 0.9, "optimizer__lr": 0.05},
    "EMA and accumulation": {"train__ema": 0.9, "train__accumulate": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_tree_gives_the_same_bits_on_any_number_of_ranks(variant: str, tmp_path: Path) -> None:
    options = {**ODD, **VARIANTS[variant], "parallel__reduce": "tree"}
    alone = fit_on(1, tmp_path / "1", small_network, **options)
    for world in WORLDS:
        together = fit_on(world, tmp_path / str(world), small_network, **options)
        assert sha(together) == sha(alone), f"{variant} on {world} ranks"
        assert timeless(together) == timeless(alone), f"{variant} on {world} ranks"


def test_two_epochs_of_digits_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    runs = [train_on(world, tmp_path / str(world), train__epochs=2, parallel__reduce="tree") for world in (1, *WORLDS)]
    assert len({sha(run) for run in runs}) == 1
    assert timeless(runs[0]) == timeless(runs[1]) == timeless(runs[2])


def test_cores_that_ranks_share_change_no_bit(tmp_path: Path) -> None:
    words = ("train", "images/digits", "train.epochs=1", "parallel.reduce=tree", "observe.tensorboard=0")
    for devices, threads in (("1", "2"), ("2", ""), ("1", "1")):
        run = f"{devices}-{threads}"
        done = cli(*words, "--devices", devices, "--run", run, cwd=tmp_path, OMP_NUM_THREADS=threads)
        assert done.returncode == 0, done.stderr
    assert sha(tmp_path / "1-2") == sha(tmp_path / "2-") == sha(tmp_path / "1-1")


@pytest.mark.slow
@pytest.mark.parametrize("residency", ["device", "host"])
def test_where_the_data_lives_does_not_matter_to_any_rank(residency: str, tmp_path: Path) -> None:
    options = {**ODD, "parallel__reduce": "tree", "data__residency": residency}
    assert sha(fit_on(2, tmp_path / "2", small_network, **options)) == sha(
        fit_on(1, tmp_path / "1", small_network, **options)
    )


@pytest.mark.parametrize(
    ("reduce", "accumulate"), first_of([("flat", 1), ("overlap", 2), ("flat", 2), ("overlap", 1)], ("overlap", 2))
)
def test_the_fast_reductions_agree_with_one_rank_to_rounding(reduce: str, accumulate: int, tmp_path: Path) -> None:
    options = {
        **ODD, "train__steps": 50, "train__epochs": 20, "train__accumulate": accumulate, "data__drop_last": True,
        "optimizer__name": "sgd", "optimizer__lr": 0.05, "optimizer__momentum": 0.9,
    }  # fmt: skip
    alone = read_weights(fit_on(1, tmp_path / "1", small_network, **options, parallel__reduce="flat").checkpoint())
    for world in WORLDS:
        run = fit_on(world, tmp_path / f"{reduce}{world}", small_network, **options, parallel__reduce=reduce)
        assert_close(read_weights(run.checkpoint()), alone, f"{reduce} on {world} ranks")


def pictures() -> tuple[nn.Module, isoscale.Sources]:
    """Convolutions whose weights are stored channels last, as fast networks do."""
    images = torch.randn(96, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(16, 1))
    data = isoscale.Sources(train={"input": images, "target": images[:, :1, 0, 0]})
    return isoscale.Supervised(network.to(memory_format=torch.channels_last), loss="mse"), data  # type: ignore[call-overload]


@pytest.mark.parametrize("reduce", first_of(["flat", "overlap", "tree"], "flat"))
def test_weights_in_any_memory_format_are_updated_alike(reduce: str, tmp_path: Path) -> None:
    """Fused optimizers take weights and gradients in the order of memory, and do not ask whether it is the same."""
    options = {"data__batch_size": 32, "train__epochs": 4, "optimizer__name": "adam", "optimizer__lr": 1e-3}
    runs = [fit_on(world, tmp_path / str(world), pictures, **options, parallel__reduce=reduce) for world in (1, 2)]
    alone, together = (read_weights(run.checkpoint("last")) for run in runs)
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", first_of(["adam", "sgd"], "adam"))
def test_weights_in_any_memory_format_are_updated_alike_after_a_restart(optimizer: str, tmp_path: Path) -> None:
    options = {"data.batch_size": 32, "train.threads": 1, "optimizer.name": optimizer, **QUIET}
    if optimizer == "sgd":
        options["optimizer.momentum"] = 0.9
    found = []
    for name, epochs in (("whole", [4]), ("parts", [2, 4])):
        for count in epochs:
            torch.manual_seed(0)
            run = isoscale.Trainer(run=tmp_path / name, **{**options, "train.epochs": count}).fit(*pictures())
        found.append(sha(run))
    assert found[0] == found[1]


@pytest.mark.slow
def test_tree_and_flat_agree_to_rounding(tmp_path: Path) -> None:
    """Without batch norm, whose statistics are those of a shard in `tree` and of the batch in `flat`."""
    options = {**ODD, "train__steps": 50, "train__epochs": 20, "optimizer__name": "sgd", "optimizer__lr": 0.05}
    runs = [fit_on(2, tmp_path / reduce, without_norm, **options, parallel__reduce=reduce)
            for reduce in ("tree", "flat", "overlap")]  # fmt: skip
    weights = [read_weights(run.checkpoint("last")) for run in runs]
    assert_close(weights[1], weights[0], "flat")
    assert_close(weights[2], weights[0], "overlap")


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    """Each tensor within 1e-6 of its norm."""
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            distance = float((found[name] - tensor).norm() / tensor.norm())
            assert distance < 1e-6, f"{where}: {name} is {distance:.1e} away"
        else:
            assert torch.equal(found[name], tensor), f"{where}: {name}"


@pytest.mark.slow
def test_a_last_batch_smaller_than_the_ranks_leaves_some_of_them_idle(tmp_path: Path) -> None:
    options = {**ODD, "data__batch_size": 82}  # 411 = 5 * 82 + 1
    for reduce in ("tree", "flat"):
        runs = [fit_on(world, tmp_path / f"{reduce}{world}", without_norm, **options, parallel__reduce=reduce)
                for world in (1, 2)]  # fmt: skip
        if reduce == "tree":
            assert sha(runs[0]) == sha(runs[1])
            assert timeless(runs[0]) == timeless(runs[1])
        assert_close(read_weights(runs[1].checkpoint("last")), read_weights(runs[0].checkpoint("last")), reduce)


class Terms(isoscale.Task):
    """A loss of two terms, and an error of which the root is shown."""

    def __init__(self) -> None:
        """A linear network."""
        super().__init__()
        self.network = nn.Linear(91, 3)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Both terms."""
        errors = self.network(batch["input"]) - batch["target"]
        self.log("rmse", errors.square().mean(), root=True)
        return {"square": errors.square().mean(), "absolute": errors.abs().mean()}

    validation_step = training_step


def terms() -> tuple[nn.Module, isoscale.Sources]:
    """The task with the data of the others."""
    return Terms(), small_network()[1]


@pytest.mark.parametrize("reduce", ["tree", "flat"])
def test_batches_of_one_sample_leave_the_first_rank_idle_and_it_still_tells_of_all(reduce: str, tmp_path: Path) -> None:
    options = {"data__batch_size": 1, "data__subset": 12, "train__epochs": 2, "observe__every": 5}
    runs = [fit_on(world, tmp_path / str(world), terms, **options, parallel__reduce=reduce) for world in (1, 2)]
    alone, together = (
        {(line["step"], line["name"]): line["value"] for line in timeless(run)} for run in runs
    )  # fmt: skip
    assert together == pytest.approx(alone, rel=1e-6) and (5, "train/rmse") in alone
    if reduce == "tree":
        assert sha(runs[0]) == sha(runs[1])
