"""Every switch composes with every other: where the data lives, the step program, precision, ranks, restarts, physics.

On a CPU a choice of combinations in which each pair of settings occurs; on a CUDA device all of them.
"""

import itertools
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import isoscale
from isoscale.data.tools.shuffle import shuffle_files
from tests.helpers import first_step, sha, timeless, train
from tests.laws.test_stop_is_invisible import continued_at
from tests.ranks import train_on

pytestmark = pytest.mark.slow

METRICS = ["band_energy", "fermi_energy", "dos_relative", "density_relative"]
BASE: dict[str, Any] = {
    "task__model__widths": [91, 32, 11], "task__physics": {"metrics": METRICS, "every": 1}, "optimizer__lr": 0.01,
    "data__subset": 1200, "data__batch_size": 500, "data__eval_batch_size": 4374, "train__epochs": 4,
    "train__threads": 1, "observe__every": 2, "checkpoint__every": "1 steps", "checkpoint__keep": 100,
}  # fmt: skip
"""Three steps per epoch, the last with 200 of 500 samples; the physics of a whole snapshot after each."""
PLACES = ("device", "host", "disk")
MIDDLE = 7
"""A step inside of the third epoch."""


@pytest.fixture(scope="module")
def base(shared: Path) -> dict[str, Any]:
    return {**BASE, "data__path": str(shared / "data/electronic/Be2")}


def values(run: isoscale.Run, name: str) -> list[float]:
    return [line["value"] for line in timeless(run) if line["name"] == name]


def assert_equal(one: isoscale.Run, other: isoscale.Run) -> None:
    assert timeless(one) == timeless(other)
    assert sha(one) == sha(other)
    assert len(values(one, "val/band_energy")) >= 4, "the physics was measured"


def assert_near(one: isoscale.Run, other: isoscale.Run, tolerance: float) -> None:
    for name in ("train/loss", "val/loss", "val/dos_relative"):
        assert values(one, name) == pytest.approx(values(other, name), rel=tolerance), name


class Way(NamedTuple):
    """How a training is run that must not be seen in its result."""

    place: str
    world: int = 1
    continued_on: int | None = None
    """Stopped in the middle of an epoch, and continued on so many ranks, from another place."""


class Arithmetic(NamedTuple):
    """What does decide about the bits."""

    reduce: str
    precision: str
    program: str


COMBINATIONS: dict[Arithmetic, list[Way]] = {
    Arithmetic("tree", "32", "eager"): [Way("device"), Way("host", 2), Way("disk", 1, 2)],
    Arithmetic("tree", "bf16", "auto"): [Way("host"), Way("disk", 2), Way("device", 2, 1)],
    Arithmetic("tree", "64", "auto"): [Way("disk"), Way("device", 2), Way("host", 1, 1)],
    Arithmetic("flat", "32", "auto"): [Way("disk"), Way("device", 1, 1), Way("host")],
    Arithmetic("flat", "64", "eager"): [Way("host", 2), Way("disk", 2), Way("device", 2, 2)],
    Arithmetic("flat", "bf16", "eager"): [Way("device", 2), Way("host", 2, 2)],
}
"""The first way of each is the one that the others are compared with."""


def trained(folder: Path, arithmetic: Arithmetic, way: Way, base: dict[str, Any]) -> isoscale.Run:
    options = {
        **base, "parallel__reduce": arithmetic.reduce, "train__precision": arithmetic.precision,
        "train__program": arithmetic.program, "data__residency": way.place,
    }  # fmt: skip
    name = "-".join(map(str, (*arithmetic, *way)))
    run = train_on(way.world, folder / name, "electronic/be2", **options)
    if way.continued_on is None:
        return run
    moved = {**options, "data__residency": PLACES[PLACES.index(way.place) - 1]}
    parts = continued_at(MIDDLE, run.path, folder / f"{name}-again")
    again = train_on(way.continued_on, parts, "electronic/be2", **moved)
    assert first_step(again) == MIDDLE
    return again


@pytest.fixture(scope="module")
def first_ways(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[Arithmetic, isoscale.Run]:
    folder = tmp_path_factory.mktemp("first")
    return {arithmetic: trained(folder, arithmetic, ways[0], base) for arithmetic, ways in COMBINATIONS.items()}


def test_every_pair_of_settings_occurs() -> None:
    seen = {
        pair
        for (reduce, precision, program), ways in COMBINATIONS.items()
        for way in ways
        for pair in itertools.combinations(
            enumerate((reduce, precision, program, way.place, way.world, way.continued_on is not None)), 2
        )
    }
    settings = (("tree", "flat"), ("32", "bf16", "64"), ("eager", "auto"), PLACES, (1, 2), (False, True))
    for one, other in itertools.combinations(range(len(settings)), 2):
        for pair in itertools.product(settings[one], settings[other]):
            assert ((one, pair[0]), (other, pair[1])) in seen, pair


@pytest.mark.parametrize(
    "arithmetic",
    [
        pytest.param(each, marks=[] if each[1] == "32" or each[0] == "tree" else pytest.mark.full)
        for each in COMBINATIONS
    ],
    ids="-".join,
)
def test_no_way_of_running_is_seen_in_the_result(
    arithmetic: Arithmetic, first_ways: dict[Arithmetic, isoscale.Run], base: dict[str, Any], tmp_path: Path
) -> None:
    for way in COMBINATIONS[arithmetic][1:]:
        assert_equal(trained(tmp_path, arithmetic, way, base), first_ways[arithmetic])


def test_curves_agree_across_precisions_reductions_and_numbers_of_ranks(
    first_ways: dict[Arithmetic, isoscale.Run],
) -> None:
    exact = first_ways[Arithmetic("tree", "64", "auto")]
    for arithmetic, run in first_ways.items():
        assert_near(run, exact, {"64": 1e-9, "32": 1e-4, "bf16": 0.1}[arithmetic.precision])


@pytest.mark.full
def test_a_compiled_step_composes_too(base: dict[str, Any], first_ways: dict[Arithmetic, isoscale.Run], tmp_path: Path):
    options = {**base, "train__program": "compiled", "train__precision": "32", "parallel__reduce": "flat"}
    whole = train(tmp_path / "whole", "electronic/be2", **options, data__residency="device")
    again = train(tmp_path / "again", "electronic/be2", **options, data__residency="disk")
    assert_equal(again, whole)
    parts = continued_at(MIDDLE, whole.path, tmp_path / "parts")
    assert_equal(train(parts, "electronic/be2", **options, data__residency="host"), whole)
    assert_near(whole, first_ways[Arithmetic("flat", "32", "auto")], 1e-4)


WATCHED = {"monitor": "val/band_energy", "mode": "min"}
SWITCHES: dict[str, dict[str, Any]] = {
    "an exact shuffle": {"data__shuffle": True},
    "a shuffle in windows": {"data__shuffle": {"samples_per_block": 50, "blocks_per_window": 6}},
    "no shuffle": {"data__shuffle": False},
    "TensorBoard with pictures": {"observe__tensorboard": 2},
    "a moving average": {"train__ema": 0.8},
    "accumulation": {"train__accumulate": 2},
    "clipping": {"train__clip": 0.01},
    "early stopping": {"train__early_stopping": {**WATCHED, "patience": 2}, "train__epochs": 20},
    "a plateau": {"schedule": {"name": "plateau", **WATCHED, "patience": 0, "gamma": 0.5}},
    "the best by energy": {"checkpoint__monitor": "val/band_energy"},
    "evaluation inside of epochs": {"train__evaluate": "2 steps"},
    "workers": {"data__workers": 3},
}
WITHOUT_EFFECT = {
    "an exact shuffle", "TensorBoard with pictures", "the best by energy", "evaluation inside of epochs", "workers",
}  # fmt: skip
"""On the weights: they are the default, or only look."""
TOGETHER = [
    "a shuffle in windows", "TensorBoard with pictures", "a moving average", "accumulation", "clipping", "a plateau",
    "early stopping",
]  # fmt: skip


def assert_goes_on(folder: Path, world: int | None = None, **options: Any) -> isoscale.Run:
    """A run that stops in the middle of an epoch, and goes on from the disk, ends as it does without."""
    start = train if world is None else partial(train_on, world)
    whole = start(folder / "whole", "electronic/be2", **options, data__residency="device")
    parts = continued_at(MIDDLE, whole.path, folder / "again")
    again = start(parts, "electronic/be2", **options, data__residency="disk")
    assert first_step(again) == MIDDLE
    assert sha(again) == sha(whole)
    assert timeless(again) == timeless(whole)
    assert again.summary()["best"] == whole.summary()["best"]
    return whole


@pytest.fixture(scope="module")
def plain(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> isoscale.Run:
    return train(tmp_path_factory.mktemp("plain") / "run", "electronic/be2", **base)


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_goes_on_in_the_middle_of_an_epoch(
    switch: str, base: dict[str, Any], plain: isoscale.Run, tmp_path: Path
) -> None:
    run = assert_goes_on(tmp_path, **{**base, **SWITCHES[switch]})
    assert (sha(run) == sha(plain)) == (switch in WITHOUT_EFFECT)


def test_a_metric_of_the_physics_steers_the_training(base: dict[str, Any], tmp_path: Path) -> None:
    stopped = train(tmp_path / "stopped", "electronic/be2", **{**base, **SWITCHES["early stopping"]})
    energies = values(stopped, "val/band_energy")[-3:]
    assert stopped.summary()["step"] < 60 and min(energies) == energies[0], "two that were no better"
    slowed = train(tmp_path / "slowed", "electronic/be2", **{**base, **SWITCHES["a plateau"]})
    assert values(slowed, "lr")[0] == 0.01 and values(slowed, "lr")[-1] < 0.01


@pytest.mark.full
def test_all_switches_go_on_together_on_two_ranks(base: dict[str, Any], tmp_path: Path) -> None:
    everything = {key: value for switch in TOGETHER for key, value in SWITCHES[switch].items()}
    options = {**base, **everything, "train__epochs": 4, "parallel__reduce": "tree", "train__precision": "bf16"}
    both = assert_goes_on(tmp_path / "2", 2, **options)
    alone = train_on(1, tmp_path / "1", "electronic/be2", **options)
    assert sha(alone) == sha(both)
    assert timeless(alone) == timeless(both)


def test_shuffled_files_go_on_in_the_middle_of_an_epoch(base: dict[str, Any], tmp_path: Path) -> None:
    folder = Path(base["data__path"])
    shuffle_files([folder / f"Be_snapshot[02].{kind}.npy" for kind in ("in", "out")], tmp_path / "Be_mixed*", files=3)
    options = {**base, "data__train": [str(tmp_path / "Be_mixed*")], "data__shuffle": False, "data__subset": None,
               "data__batch_size": 6000}  # fmt: skip
    run = assert_goes_on(tmp_path, **options)
    assert len(values(run, "val/band_energy")) >= 4


CUDA_PLACES, PROGRAMS, PRECISIONS = PLACES, ("eager", "graphed", "compiled"), ("32", "tf32", "bf16", "fp16")
TOLERANCES = {"32": 1e-3, "tf32": 0.02, "bf16": 0.2, "fp16": 0.2}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", PRECISIONS)
def test_on_a_device_all_combinations_agree(precision: str, base: dict[str, Any], tmp_path: Path) -> None:
    options = {**base, "train__device": "cuda", "train__precision": precision, "checkpoint__every": "7 steps",
               "train__steps_per_launch": 2}  # fmt: skip
    runs = {
        (program, place): train(tmp_path / f"{program}-{place}", "electronic/be2",
                                **{**options, "train__program": program, "data__residency": place})
        for program, place in itertools.product(PROGRAMS, CUDA_PLACES)
    }  # fmt: skip
    for (program, _), run in runs.items():
        assert_equal(run, runs[program, "device"])
    assert_equal(runs["graphed", "device"], runs["eager", "device"])
    assert_near(runs["compiled", "device"], runs["eager", "device"], TOLERANCES[precision])
    for program in PROGRAMS:
        parts = continued_at(7, runs[program, "host"].path, tmp_path / f"{program}-again")
        again = train(parts, "electronic/be2", **{**options, "train__program": program, "data__residency": "device"})
        assert_equal(again, runs[program, "host"])
    exact = train(tmp_path / "exact", "electronic/be2", **{**options, "train__precision": "64"})
    assert_near(runs["eager", "device"], exact, TOLERANCES[precision])
    assert np.isfinite(values(exact, "val/band_energy")).all()
