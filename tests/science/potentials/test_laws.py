"""The laws on real water: no number of ranks, no place of the data and no stop is seen in what a potential learned."""

import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

import isoscale
from isoscale.science.potentials.task import Potential
from tests.helpers import QUIET, first_of, first_step, sha, timeless, train
from tests.laws.test_stop_is_invisible import continued_at
from tests.ranks import command_on, train_on

pytestmark = pytest.mark.slow

STEPS = 9
"""Of 2 systems with 4 frames a batch; a log and an evaluation every 3."""
MIDDLE = 4


def small(water: Path) -> dict[str, Any]:
    """A recipe for a network so small that a step takes little time, and everything that it takes to be right."""
    descriptor = {"class": "se_e2_a", "sel": [46, 92], "cutoff": 4.0, "widths": [4, 8], "axis_width": 2}
    model = {"class": "deep_potential", "types": ["O", "H"], "descriptor": descriptor, "fitting_widths": [8, 8]}
    systems = {split: [str(water / name) for name in names] for split, names in SPLITS.items()}
    return {
        "seed": 3,
        "task": {"class": "potential", "model": model, "statistics_frames": 2},
        "data": {"class": "atomic_systems", **systems, "batch_size": 4},
        "optimizer": {"name": "adam", "lr": 1e-3},
        "schedule": {"name": "exponential", "end": 1e-5, "every": 2},
        "train": {
            "steps": STEPS, "epochs": None, "precision": "64", "threads": 1, "evaluate": "3 steps",
            "limit_val_batches": 2,
            "loss_weights": {
                "energy": {"start": 0.02, "end": 1, "follows": "rate"},
                "force": {"start": 1000, "end": 1, "follows": "rate"},
            },
        },
        "parallel": {"reduce": "tree"},
        "checkpoint": {"every": "1 steps", "keep": 100},
        "observe": {"every": 3, "curve": "lcurve.out"},
    }  # fmt: skip


SPLITS = {"train": ("data_0", "data_1"), "val": ("data_3",)}


@pytest.fixture(scope="module")
def recipe(shared: Path) -> dict[str, Any]:
    return small(shared / "data/potentials/water")


@pytest.fixture(scope="module")
def whole(recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> isoscale.Run:
    """The run that others are compared with: one rank, from its first step to its last."""
    return train(tmp_path_factory.mktemp("whole") / "run", recipe, data__residency="device")


def curve(run: isoscale.Run | Path) -> str:
    path = run.path if isinstance(run, isoscale.Run) else run
    return (path / "lcurve.out").read_text()


def assert_equal(one: isoscale.Run | Path, other: isoscale.Run | Path) -> None:
    assert timeless(one) == timeless(other)
    assert curve(one) == curve(other)
    assert sha(one) == sha(other)


def values(run: isoscale.Run, name: str) -> list[float]:
    return [line["value"] for line in timeless(run) if line["name"] == name]


def test_the_run_that_others_are_compared_with_has_learned_and_says_so(whole: isoscale.Run) -> None:
    errors = values(whole, "val/force_rmse")
    assert len(errors) >= 3 and errors[-1] != errors[0]
    head, _, *rows = curve(whole).splitlines()
    assert head.split()[2:4] == ["rmse_val", "rmse_trn"] and "rmse_f_val" in head
    assert [int(row.split()[0]) for row in rows] == [1, 3, 6, 9] and "nan" not in "".join(rows)


@pytest.mark.parametrize("place", ["host", "disk"])
def test_where_the_frames_live_is_not_seen(
    place: str, recipe: dict[str, Any], whole: isoscale.Run, tmp_path: Path
) -> None:
    assert_equal(train(tmp_path / "run", recipe, data__residency=place), whole)


def test_two_ranks_learn_the_same_to_the_bit(recipe: dict[str, Any], whole: isoscale.Run, tmp_path: Path) -> None:
    assert_equal(train_on(2, tmp_path / "run", recipe, data__residency="host"), whole)


def test_ranks_that_add_gradients_the_fast_way_agree_to_rounding(
    recipe: dict[str, Any], whole: isoscale.Run, tmp_path: Path
) -> None:
    flat = train_on(2, tmp_path / "run", recipe, parallel__reduce="flat")
    for name in ("train/loss", "val/loss", "val/force_rmse", "val/energy_rmse"):
        assert values(flat, name) == pytest.approx(values(whole, name), rel=1e-9), name
    assert curve(flat) == curve(whole), "three digits hide what rounding does"


def test_a_batch_in_two_pieces_is_the_same_batch(
    recipe: dict[str, Any], whole: isoscale.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, plain = [], Potential.training_step

    def noted(self: Potential, batch: Any, batch_idx: int) -> Any:
        sizes.append(len(batch["energy"]))
        return plain(self, batch, batch_idx)

    monkeypatch.setattr(Potential, "training_step", noted)
    run = train(tmp_path / "run", recipe, parallel__reduce="flat", train__accumulate=2)
    assert sizes == [2] * 2 * STEPS, "a tree would cut it into single frames anyway"
    for name in ("train/loss", "val/loss", "val/force_rmse"):
        assert values(run, name) == pytest.approx(values(whole, name), rel=1e-9), name


@pytest.mark.nightly
def test_a_compiled_step_agrees_to_rounding(recipe: dict[str, Any], tmp_path: Path) -> None:
    one = {"data__train": recipe["data"]["train"][:1], "parallel__reduce": "flat", "train__steps": 3}
    eager, compiled = (
        train(tmp_path / program, recipe, train__program=program, **one) for program in ("eager", "compiled")
    )
    assert compiled.record["decided"]["program"] == "compiled"
    for name in ("train/loss", "val/loss", "val/force_rmse"):
        assert values(compiled, name) == pytest.approx(values(eager, name), rel=1e-9), name


@pytest.mark.parametrize(("world", "place"), [(1, "disk"), (2, "host")])
def test_a_run_goes_on_in_the_middle_on_any_number_of_ranks(
    world: int, place: str, recipe: dict[str, Any], whole: isoscale.Run, tmp_path: Path
) -> None:
    parts = continued_at(MIDDLE, whole.path, tmp_path / "run")
    again = train_on(world, parts, recipe, data__residency=place)
    assert first_step(again) == MIDDLE
    assert_equal(again, whole)


MORTAL = '''
import os, signal
from pathlib import Path
from isoscale.science.potentials.task import Potential

class Mortal(Potential):
    """Sends its own process a signal once, in the step or the evaluation that DIES_IN names."""
    calls = 0
    def training_step(self, batch, batch_idx):
        type(self).calls += 1
        self.die("step", 5)
        return super().training_step(batch, batch_idx)
    def validation_step(self, batch, batch_idx):
        self.die("evaluation", 6)
        return super().validation_step(batch, batch_idx)
    def die(self, place, after):
        if os.environ.get("DIES_IN") == place and type(self).calls >= after and not Path("dead").exists():
            Path("dead").touch()
            os.kill(os.getpid(), int(os.environ["SIGNAL"]))
'''


DEATHS = [(number, place) for number in (signal.SIGTERM, signal.SIGKILL) for place in ("step", "evaluation")]


@pytest.mark.parametrize(("number", "place"), first_of(DEATHS, DEATHS[0], DEATHS[3]))
def test_a_signal_in_a_step_or_an_evaluation_leaves_no_trace(
    number: int, place: str, recipe: dict[str, Any], whole: isoscale.Run, tmp_path: Path
) -> None:
    (tmp_path / "mortal.py").write_text(MORTAL)
    dying = {**recipe, "task": {**recipe["task"], "class": "mortal.Mortal"}, "checkpoint": {"every": "2 steps"}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(dying))
    words = ("recipe.yaml", "--run", "run", *(f"{key}={value}" for key, value in QUIET.items()))
    (first,) = command_on(1, tmp_path, "train", *words, DIES_IN=place, SIGNAL=str(int(number)))
    assert first.code == (75 if number == signal.SIGTERM else -number), first.err
    (second,) = command_on(1, tmp_path, "train", *words)
    assert second.code == 0, second.err
    assert_equal(tmp_path / "run", whole)
