import csv
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from isoscale.errors import UserError
from isoscale.launch.config import merged
from isoscale.launch.schedulers.slurm import Slurm
from isoscale.parallel.collectives import ALONE
from isoscale.recipe.load import load_recipe
from isoscale.study.scale import chart as scale_chart
from isoscale.study.scale import local as scale_local
from isoscale.study.scale import rank as scale_rank
from isoscale.study.scale import table as scale_table
from isoscale.study.scale.job import Request
from isoscale.study.scale.study import Measurement, Question, Study, begin, check, global_batch

RECORD = {
    "isoscale": "0.1.0", "packages": {"torch": "2.13.0"}, "host": "here", "started": "2026-03-01T12:00:00+0000",
    "hardware": {"processor": "A processor", "device": ""}, "command": ["isoscale", "scale", "--ranks", "1,2"],
}  # fmt: skip
DECIDED = {"device": "cpu", "threads": 1, "precision": "32", "program": "eager", "reduce": "flat"}


def measured(ranks: int, *seconds: float, repeat: int = 1, **others: Any) -> Measurement:
    """100 samples in so many seconds on each rank."""
    values: dict[str, Any] = {
        "batch_size": 64, "steps": 10, "samples": 100, "seconds": list(seconds), "startup": [3.0] * ranks,
        "warmup": 1.0, "hosts": ["n1"] * ranks, "device": "cpu", "decided": DECIDED, "measured": "now",
    }  # fmt: skip
    return Measurement(ranks, repeat, **{**values, **others})


def study(*found: Measurement, ranks: list[int] | None = None, repeats: int = 1, path: Path = Path("runs/x")) -> Study:
    counts = ranks or sorted({each.ranks for each in found})
    return Study(path, "digits", "strong", counts, repeats, None, 1, RECORD, measurements=list(found))


def test_the_slowest_rank_and_the_median_of_the_repeats_count():
    found = study(
        measured(1, 1.0), measured(1, 3.0, repeat=2), measured(1, 1.2, repeat=3),
        measured(2, 0.4, 0.6), measured(2, 0.5, 0.1, repeat=2), measured(2, 0.8, 0.9, repeat=3),
    )  # fmt: skip
    one, two = found.rows()
    assert (one.seconds_per_100, one.fastest, one.slowest) == (1.2, 1.0, 3.0)
    assert (two.seconds_per_100, two.fastest, two.slowest) == (0.6, 0.5, 0.9)
    assert (one.speedup, one.efficiency) == (1.0, 1.0)
    assert (two.speedup, two.efficiency) == (pytest.approx(2.0), pytest.approx(1.0))
    assert two.samples_per_second == pytest.approx(100 / 0.6)


def test_speed_up_is_against_the_smallest_number_of_ranks():
    found = study(measured(2, 1.0, 1.0), measured(8, *[0.5] * 8))
    assert [(row.speedup, row.efficiency) for row in found.rows()] == [(1.0, 1.0), (2.0, 0.5)]
    assert "against 2 ranks" in scale_table.text(found)


def test_what_is_not_measured_is_not_printed():
    found = study(measured(4, *[0.5] * 4, startup=None), ranks=[1, 2, 4])
    assert [row.ranks for row in found.rows()] == [4] and found.rows()[0].speedup is None
    shown = scale_table.text(found)
    for head in ("speed-up", "efficiency", "min–max", "start-up"):
        assert head not in shown
    assert "Not measured yet: 2 of 3" in shown and "isoscale scale --run runs/x" in shown


def test_one_repeat_claims_no_spread_and_no_median():
    once = scale_table.markdown(study(measured(1, 1.0), measured(2, 0.5, 0.5)))
    assert "min–max" not in once and "median" not in once and "measured once" in once
    twice = scale_table.markdown(study(measured(1, 1.0), measured(1, 2.0, repeat=2), repeats=2))
    assert "| min–max |" in twice and "1.000–2.000" in twice and "median of 2 repeats" in twice
    mixed = scale_table.text(study(measured(1, 1.0), measured(1, 2.0, repeat=2), measured(2, 0.5, 0.5), repeats=2))
    assert mixed.count("1.000–2.000") == 1 and "0.5000–" not in mixed


def test_markdown_is_a_table_with_what_it_was_measured_on():
    text = scale_table.markdown(study(measured(1, 1.0), measured(2, 0.5, 0.5, hosts=["n1", "n2"])))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[0].split(" | ")[:4] == ["| ranks", "hosts", "batch", "s per 100 samples"]
    assert rows[3] == "| 2 | 2 | 64 | 0.5000 | 200 | 2.00 | 100% | 3.0 |"
    assert "A processor" in text and "n1, n2" in text and "torch 2.13.0" in text
    assert "`isoscale scale --ranks 1,2`" in text


def test_csv_has_the_unrounded_numbers():
    rows = list(csv.DictReader(scale_table.as_csv(study(measured(1, 1.0), measured(3, *[0.3] * 3))).splitlines()))
    assert [int(row["ranks"]) for row in rows] == [1, 3]
    assert float(rows[1]["speedup"]) == pytest.approx(1 / 0.3) and float(rows[1]["efficiency"]) == pytest.approx(
        1 / 0.9
    )


def test_rank_counts_take_turns_and_only_what_is_missing_is_measured():
    assert study(ranks=[1, 2], repeats=2).missing == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert study(measured(2, 1.0, 1.0), ranks=[1, 2], repeats=2).missing == [(1, 1), (2, 1), (2, 2)]


def test_a_study_reads_back_as_it_was_written(tmp_path: Path):
    found = study(measured(1, 1.0), path=tmp_path)
    found.write()
    assert Study.read(tmp_path) == found
    more = found.with_measurement(measured(2, 0.5, 0.5))
    more.write()
    assert Study.read(tmp_path).measurements == more.measurements


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"measurements": [{}]}', '{"measurements": 1}'])
def test_a_damaged_study_is_said_to_be_one(tmp_path: Path, text: str):
    (tmp_path / "scale.json").write_text(text)
    with pytest.raises(UserError, match=r"scale\.json is damaged"):
        Study.read(tmp_path)


def test_a_folder_without_a_study_says_how_to_begin_one(tmp_path: Path):
    with pytest.raises(UserError, match="isoscale scale RECIPE --ranks"):
        Study.read(tmp_path)


@pytest.mark.parametrize(
    ("keys", "mode", "ranks", "words"),
    [
        (["parallel.reduce=tree"], "strong", [1, 3], "use 2 or 4"),
        (["parallel.reduce=tree"], "strong", [16], "use 8"),
        (["data.batch_size=4"], "strong", [1, 8], "does not reach 8 ranks"),
    ],
)
def test_an_impossible_number_of_ranks_is_refused(keys: list[str], mode: Any, ranks: list[int], words: str):
    with pytest.raises(UserError, match=words):
        check(load_recipe("images/digits", keys).recipe, Question(mode, ranks, 1, None))


def test_strong_keeps_the_whole_batch_and_weak_that_of_a_rank():
    recipe = load_recipe("images/digits", ["data.batch_size=32"]).recipe
    assert [global_batch(recipe, "strong", count) for count in (1, 4)] == [32, 32]
    assert [global_batch(recipe, "weak", count) for count in (1, 4)] == [32, 128]
    auto = [load_recipe("images/digits", [f"data.batch_size={word}"]).recipe for word in ("auto", "auto:9", "auto:9x2")]
    assert [global_batch(recipe, "weak", 4) for recipe in auto] == ["auto:32x4", "auto:9x4", "auto:9x8"]
    mixture = load_recipe("images/digits", ["data.batch_size=[2,3]"]).recipe
    assert global_batch(mixture, "weak", 4) == [8, 12]


def test_a_directory_that_holds_something_else_is_left_alone(tmp_path: Path):
    (tmp_path / "precious").touch()
    with pytest.raises(UserError, match="holds no study"):
        begin(load_recipe("images/digits"), Question("strong", [1], 1, None), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


class Steps:
    """A program that only counts, and a clock by which its steps take time."""

    profile = None

    def __init__(self, seconds: float, first: float = 0.0) -> None:
        self.calls: list[tuple[int, int]] = []
        self.now = 1.0
        self._seconds, self._first = seconds, first

    def run(self, start: int, stop: int, interrupted: Any) -> int:
        self.now += (stop - start) * self._seconds + (0 if self.calls else self._first)
        self.calls.append((start, stop))
        return stop

    run_visibly = run_eagerly = run


def timed(program: Steps, steps: int | None, monkeypatch: pytest.MonkeyPatch) -> scale_rank.Stopwatch:
    """Let a stopwatch run a program in windows of 50 steps until it has enough."""
    monkeypatch.setattr(scale_rank.time, "perf_counter", lambda: program.now)
    watch = scale_rank.Stopwatch(program, ALONE, lambda: None, steps)
    with pytest.raises(scale_rank._Enough):
        for start in range(0, 100_000, 50):
            watch.run(start, start + 50, lambda: False)
    return watch


def test_only_steps_after_the_warm_up_are_timed_and_as_many_as_asked_for(monkeypatch: pytest.MonkeyPatch):
    program = Steps(0.01, first=60.0)
    watch = timed(program, 120, monkeypatch)
    assert watch.last - watch.first == 120 and program.calls[-1][1] == watch.last
    assert program.calls[0] == (0, 1) and watch.seconds == pytest.approx(120 * 0.01)
    assert watch.warmup == pytest.approx(60.0 + 0.01 * watch.first)
    assert watch.first * 0.01 >= scale_rank.WARM_SECONDS, "the first step, which compiles, warms nothing up"
    within = [call for call in program.calls if call[0] >= watch.first]
    assert len(within) <= 4, "windows that count are not cut into pieces"


@pytest.mark.parametrize(("seconds", "steps"), [(0.001, 2000), (0.1, 20), (5.0, scale_rank.FEWEST_STEPS)])
def test_without_a_number_there_are_as_many_steps_as_fill_the_time(
    monkeypatch: pytest.MonkeyPatch, seconds: float, steps: int
):
    watch = timed(Steps(seconds), None, monkeypatch)
    assert watch.last - watch.first == pytest.approx(steps, abs=1)


def test_a_request_to_stop_ends_the_measurement():
    class Stopping(Steps):
        def run(self, start: int, stop: int, interrupted: Any) -> int:
            return start

    assert scale_rank.Stopwatch(Stopping(0.0), ALONE, lambda: None, None).run(7, 50, lambda: True) == 7


def test_what_is_no_step_is_switched_off():
    keys = ["schedule.name=plateau", "train.nan=rollback", "train.early_stopping.monitor=val/loss"]
    loaded = load_recipe("images/digits", keys)
    found = scale_rank._keys(replace(study(ranks=[1, 2]), mode="weak"), loaded.recipe, 2)
    recipe = load_recipe(
        "images/digits", [*keys, *(f"{key}={json.dumps(value)}" for key, value in found.items())]
    ).recipe
    assert recipe.train.evaluate == recipe.checkpoint.every == "never" and recipe.train.early_stopping is None
    assert recipe.schedule.name == "constant" and recipe.train.nan == "stop"
    assert recipe.observe.tensorboard == 0 and recipe.observe.loggers == [] and recipe.parallel.verify == 0
    assert recipe.data.batch_size == 128 and recipe.data.drop_last


def test_a_process_knows_its_age():
    age = scale_rank.process_age()
    assert age is not None and age > 0
    time.sleep(0.05)
    assert scale_rank.process_age() > age


def test_every_rank_has_as_many_threads_whatever_their_number(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scale_local, "num_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [scale_local.threads(most) for most in (1, 2, 8, 16)] == [8, 4, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert scale_local.threads(8) == 3


def test_threads_are_set_for_the_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    seen: list[Any] = []

    class Failed:
        has_ended, was_told, code = True, False, 2

        def __init__(self, words: list[str], variables: dict[str, str]) -> None:
            seen.append((words[-1], variables))

    monkeypatch.setattr(scale_local.runner, "Process", Failed)
    begun = replace(study(ranks=[2], path=tmp_path), threads=4)
    begun.write()
    assert scale_local.complete(begun, print)[1] == 2
    assert seen == [("2:1", {"OMP_NUM_THREADS": "4"})]


def test_more_ranks_than_cores_is_said(monkeypatch: pytest.MonkeyPatch):
    recipe = load_recipe("images/digits", ["train.device=cpu"]).recipe
    monkeypatch.setattr(scale_local, "num_cores", lambda: 4)
    assert scale_local.warning(recipe, 4) is None
    assert "8 ranks share 4 cores" in (scale_local.warning(recipe, 8) or "")


@pytest.mark.parametrize(
    ("options", "nodes", "per_node"),
    [
        ({"nodes": 2, "tasks_per_node": 2}, 2, 2),
        ({"nodes": 2}, 2, 2),
        ({"tasks_per_node": 1}, 4, 1),
        ({"gpus_per_node": 4}, 1, 4),
        ({}, 1, 4),
    ],
)
def test_a_job_has_room_for_all_ranks(options: dict[str, int], nodes: int, per_node: int):
    found = Request.of(merged(options), 4).resources
    assert (found.nodes, found.tasks_per_node) == (nodes, per_node)


def test_a_job_that_is_too_small_is_refused():
    with pytest.raises(UserError, match="use --nodes 4"):
        Request.of(merged({"nodes": 2, "tasks_per_node": 1}), 4)


def test_every_measurement_is_a_step_of_the_job_on_as_few_nodes_as_it_needs():
    request = Request.of(merged({"tasks_per_node": 2, "partition": "gpu", "container": "apptainer:x.sif"}), 4)
    script = Slurm().script(request.job(study(ranks=[1, 2, 4], repeats=2)))
    assert "#SBATCH --nodes=2\n" in script and "#SBATCH --partition=gpu\n" in script
    assert "export OMP_NUM_THREADS=1\n" in script
    loop = script[script.index("for repeat") :].splitlines()
    called = "apptainer exec x.sif isoscale scale --run runs/x --measure"
    assert loop == [
        "for repeat in 1 2; do",
        f"  srun --nodes=1 --ntasks=1 --ntasks-per-node=1 {called} 1:$repeat || exit",
        f"  srun --nodes=1 --ntasks=2 --ntasks-per-node=2 {called} 2:$repeat || exit",
        f"  srun --nodes=2 --ntasks=4 --ntasks-per-node=2 {called} 4:$repeat || exit",
        "done",
    ]


def test_the_picture_is_drawn_once_there_is_a_speed_up(tmp_path: Path):
    assert not scale_chart.draw(study(measured(2, 1.0, 1.0), ranks=[1, 2]), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()
    assert scale_chart.draw(study(measured(1, 1.0), measured(2, 0.6, 0.6), measured(4, *[2.0] * 4)), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
