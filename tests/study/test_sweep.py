"""The points of a sweep: which they are, what they are called, and what is refused before anything starts."""

import itertools
import json
import math
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isoscale.errors import UserError
from isoscale.launch.job import Array
from isoscale.recipe.load import load_recipe
from isoscale.runs.run import Run
from isoscale.study.sweep.local import Crew
from isoscale.study.sweep.plan import Plan, Sweep, plan, reopen, with_lists
from isoscale.study.sweep.points import LONGEST_NAME, names_of, points_of, short_keys
from isoscale.study.sweep.states import best_first, counts, select, states_of
from tests.science.potentials.deepmd import made_input as deepmd_input

LRS = (1e-3, 3e-4)
SHORT = ("observe.tensorboard=0", "train.epochs=1")


def points(*words: str) -> list[dict]:
    return points_of(load_recipe("images/digits", list(words)))


def planned(*words: str) -> Plan:
    return plan("images/digits", [*words], ["isoscale", "sweep"], check_components=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_product_is_every_combination_in_order():
    found = points("sweep.optimizer.lr=[1e-3,3e-4]", "sweep.seed=[0,1,2]")
    assert found == [{"optimizer.lr": lr, "seed": seed} for lr, seed in itertools.product(LRS, (0, 1, 2))]


def test_zip_goes_through_lists_together():
    found = points("sweep.how=zip", "sweep.optimizer.lr=[1e-3,3e-4]", "sweep.seed=[5,6]")
    assert found == [{"optimizer.lr": 1e-3, "seed": 5}, {"optimizer.lr": 3e-4, "seed": 6}]


RANDOM = ("sweep.how=random", "sweep.optimizer.lr={min: 1e-4, max: 1e-2, log: true}",
          "sweep.data.batch_size={min: 16, max: 19}", "sweep.task.model.activation=[relu,gelu]")  # fmt: skip


def test_random_draws_are_a_function_of_the_seed_and_a_larger_budget_adds_to_a_smaller_one():
    few, many = points(*RANDOM, "sweep.budget=5"), points(*RANDOM, "sweep.budget=50")
    assert many[:5] == few
    assert few[:2] == [
        {"optimizer.lr": 0.0007593, "data.batch_size": 18, "task.model.activation": "gelu"},
        {"optimizer.lr": 0.0002139, "data.batch_size": 17, "task.model.activation": "relu"},
    ]
    assert points(*RANDOM, "sweep.budget=5", "seed=1")[0] != few[0]


def test_random_values_stay_in_their_ranges_whole_ones_whole_and_log_is_even_on_its_scale():
    found = points(*RANDOM, "sweep.budget=400")
    rates = [values["optimizer.lr"] for values in found]
    sizes = {values["data.batch_size"] for values in found}
    assert sizes == {16, 17, 18, 19} and all(isinstance(size, int) for size in sizes)
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)
    assert 0.4 < sum(rate < 1e-3 for rate in rates) / len(rates) < 0.6
    assert {values["task.model.activation"] for values in found} == {"relu", "gelu"}


def test_random_points_are_different_and_too_many_are_refused_with_the_number_there_is():
    words = ("sweep.how=random", "sweep.seed=[0,1,2]", "sweep.optimizer.lr=[1e-3,3e-4]")
    found = points(*words, "sweep.budget=6")
    assert len({json.dumps(values) for values in found}) == 6
    with pytest.raises(UserError, match=r"only 6 different points .* write sweep.budget=6"):
        points(*words, "sweep.budget=7")


@pytest.mark.parametrize(
    ("words", "said"),
    [(("sweep.budget=3", "sweep.seed=[1]"), "only for sweep.how: random"),
     (("sweep.how=random", "sweep.seed=[1]"), "Write sweep.budget"),
     (("sweep.seed={min: 0, max: 3}",), "only a random sweep draws from a range"),
     (("sweep.how=zip", "sweep.seed=[1,2]", "sweep.optimizer.lr=[1]"), "optimizer.lr has 1"),
     (("sweep.seed=3",), "expected a list of values to try, such as [1, 2], found 3"),
     (("sweep.seed=[]",), "found an empty list"), (("sweep.hwo=zip",), 'did you mean "how"?'),
     (("sweep.how=random", "sweep.budget=2", "sweep.seed={min: 3, max: 1}"), "min must be below max"),
     (("sweep.how=random", "sweep.budget=2", "sweep.seed={min: 0, max: 1, log: true}"), "a min above 0"),
     (("sweep.how=random", "sweep.budget=2", "sweep.seed={min: 0}"), "max: needed here"),
     (("sweep.launch.time=[1,2]",), "one job asks for the same"), ((), "no sweep; say which values to try"),
     (("sweep.how=zip",), "no sweep; say which"),
     ((f"sweep.seed={list(range(101))}", f"sweep.optimizer.lr={list(range(1, 101))}"), "10,100 points")],
)  # fmt: skip
def test_what_is_no_sweep_is_refused_in_words(words: tuple[str, ...], said: str):
    with pytest.raises(UserError) as refused:
        points(*words)
    assert said in str(refused.value)


def test_all_mistakes_of_the_section_are_named_at_once_with_their_lines(folder: Path):
    Path("a.yaml").write_text("extends: images/digits\nsweep:\n  seed: 3\n  how: zap\n  optimizer.lr: {}\n")
    with pytest.raises(UserError) as refused:
        load_recipe("a.yaml")
    assert "a.yaml:3: sweep.seed: expected a list" in str(refused.value)
    assert 'a.yaml:4: sweep.how: expected product, zip or random, found "zap"' in str(refused.value)
    assert "a.yaml:5: sweep.optimizer.lr: expected a list" in str(refused.value)


def test_every_point_is_checked_and_its_mistake_stands_where_it_was_written(folder: Path):
    text = (
        "extends: images/digits\nsweep:\n  optimizer.lr: [1e-3, -1]\n  optimzer.betas: [1]\n  task.model.dropot: [0]\n"
    )
    Path("a.yaml").write_text(text)
    with pytest.raises(UserError) as refused:
        plan("a.yaml", [], [])
    said = str(refused.value)
    assert "a.yaml:3: optimizer.lr: expected a number above 0, found -1 (in the point lr=-1,betas=1,dropot=0)" in said
    assert 'a.yaml:4: optimzer: unknown key (in the point lr=0.001,betas=1,dropot=0); did you mean "optimizer"?' in said
    assert "a.yaml:5: task.model.dropot: MLP takes no such argument" in said and len(said.splitlines()) == 4


def test_two_points_that_are_the_same_training_are_refused():
    with pytest.raises(UserError, match=r"the same training: optimizer\.lr=1 and optimizer\.lr=1\.0"):
        planned("optimizer.lr=1,1.0")


@pytest.mark.parametrize(
    ("word", "read"),
    [("seed=0,1", "sweep.seed=[0,1]"), ("seed=0", "seed=0"), ("name=a,b", "sweep.name=[a,b]"),
     ('name="a,b"', 'name="a,b"'), ("task.model.widths=[64,10]", "task.model.widths=[64,10]"),
     ("task.model.widths=[64,10],[64,9,10]", "sweep.task.model.widths=[[64,10],[64,9,10]]"),
     ("schedule={name: constant, end: 1}", "schedule={name: constant, end: 1}"), ("~schedule", "~schedule"),
     ("sweep.seed=[0,1]", "sweep.seed=[0,1]"), ("data.path=[", "data.path=[")],
)  # fmt: skip
def test_commas_outside_of_brackets_and_quotes_separate_values(word: str, read: str):
    assert with_lists([word]) == [read]


def test_points_and_sections_are_written_alike_and_later_ones_win(folder: Path):
    Path("a.yaml").write_text("extends: images/digits\nsweep: {optimizer.lr: [1], seed: [0]}\n")
    Path("b.yaml").write_text("extends: a.yaml\nsweep: {optimizer: {lr: [2], weight_decay: [0]}}\n")
    found = points_of(load_recipe("b.yaml", ["sweep.optimizer.lr=[3]", "~sweep.seed"]))
    assert found == [{"optimizer.lr": 3, "optimizer.weight_decay": 0}]


def test_names_are_the_last_words_of_keys_that_tell_them_apart():
    keys = ["optimizer.lr", "seed", "task.model.dropout", "task.head.dropout"]
    assert list(short_keys(keys).values()) == ["lr", "seed", "model.dropout", "head.dropout"]
    assert short_keys(["schedule.end", "end"]) == {"schedule.end": "schedule.end", "end": "end"}


def test_names_have_safe_characters_and_give_way_to_numbers_where_that_is_not_enough():
    assert names_of([{"data.path": "/a b/c$", "task.model.widths": [64, 10], "x": None, "y": True}]) == [
        "path=-a-b-c-,widths=64-10,x=null,y=true"
    ]
    for one, other in (("a b", "a-b"), ("a", "A")):
        alike = names_of([{"data.path": one}, {"data.path": other}])
        assert [name[:2] for name in alike] == ["0-", "1-"] and len(set(alike)) == 2
    assert names_of([{"x": "y" * LONGEST_NAME}])[0].startswith("0-")


@given(st.lists(st.text(max_size=120), min_size=1, max_size=12, unique=True))
def test_names_are_different_short_and_one_word_of_a_path(texts: list[str]):
    names = names_of([{"data.path": text} for text in texts])
    assert len({name.lower() for name in names}) == len(names)
    assert all(0 < len(name) <= LONGEST_NAME and "/" not in name and name.isascii() for name in names)


@pytest.mark.parametrize(("tasks", "text"), [([0, 1, 2, 3], "0-3"), ([1], "1"), ([0, 2, 3, 7], "0,2-3,7")])
def test_the_tasks_of_an_array_are_written_as_ranges(tasks: list[int], text: str):
    assert Array(tasks).ranges == text


def test_workers_share_gpus_and_cores(monkeypatch: pytest.MonkeyPatch):
    four = ["0", "1", "2", "3"]
    assert [Crew(2, 2).gpus(slot, four) for slot in (0, 1)] == [
        {"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]  # fmt: skip
    assert [Crew(3).gpus(slot, ["5", "7"])["CUDA_VISIBLE_DEVICES"] for slot in (0, 1, 2)] == ["5", "7", "5"]
    assert Crew(1, 2).gpus(0, four) == {} and Crew(2).gpus(1, ["0"]) == {} and Crew(2).gpus(1, []) == {}
    monkeypatch.setattr("isoscale.study.sweep.local.num_cores", lambda: 16)
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert Crew(2, 4).variables(0)["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert Crew(2, 4).variables(0)["OMP_NUM_THREADS"] == "3"


def finish(sweep: Sweep, name: str, best: float | None, status: str = "done") -> None:
    """Write down an end, as a training does."""
    directory = Run(sweep.path / name).directory
    directory.update(status=status, step=4, num_steps=4, message="why" if status == "failed" else "")
    value = json.dumps(best)
    directory.metrics.write_text(f'{{"step": 4, "epoch": 0, "name": "val/accuracy", "value": {value}, "time": 0}}\n')


def test_points_are_prepared_with_their_own_values_and_without_the_sweep(folder: Path):
    sweep = planned("optimizer.lr=1e-3,3e-4", "seed=0,1").write(Path("s"))
    assert [point.name for point in sweep.points] == Path("s/points.txt").read_text().split()
    assert points_of(load_recipe(Path("s/recipe.yaml"))) == [point.values for point in sweep.points]
    text = Path("s/lr=0.0003,seed=1/recipe.yaml").read_text()
    assert "  lr: 0.0003  # sweep\n" in text and "seed: 1  # sweep\n" in text and "sweep:" not in text
    assert Run("s/lr=0.0003,seed=1").status == "submitted"
    assert {state.status for state in states_of(sweep)} == {"waiting"}


def test_the_best_point_comes_first_in_the_direction_of_the_recipe(folder: Path):
    for mode, expected in (("max", [2, 0, 1, 3]), ("min", [0, 2, 1, 3])):
        sweep = planned("seed=0,1,2,3", f"checkpoint.mode={mode}").write(Path(mode))
        for seed, best in enumerate((0.5, None, 0.9)):
            finish(sweep, f"seed={seed}", best)
        states = best_first(sweep, states_of(sweep))
        assert [state.point.values["seed"] for state in states] == expected
        assert counts(states) == "3 of 4 done"


def test_done_points_are_left_alone_and_failed_ones_can_be_chosen(folder: Path):
    sweep = planned("seed=0,1,2,3").write(Path("s"))
    finish(sweep, "seed=0", 0.5)
    finish(sweep, "seed=1", None, "failed")
    finish(sweep, "seed=2", 0.5, "stopped")
    assert [point.name for point in select(sweep).points] == ["seed=1", "seed=2", "seed=3"]
    assert [point.name for point in select(sweep, only_failed=True).points] == ["seed=1"]


def test_another_recipe_is_refused_with_the_difference_and_a_longer_one_trains_done_points_on(folder: Path):
    sweep = planned("seed=0,1", "train.epochs=2").write(Path("s"))
    finish(sweep, "seed=0", 0.5)
    for words, said in (
        (["optimizer.lr=5"], "optimizer.lr: 0.002 → 5"), (["seed=0,2"], r"sweep.seed: \[0, 1\] → \[0, 2\]"),
        (["train.epochs=1"], "not shorter"), (["sweep.how=zip"], "sweep.how"), (["seed=1"], "seed: 0 → 1"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            reopen(Path("s"), None, words)
    with pytest.raises(UserError, match=r"sweep.seed: \[0, 1\] → \(not set\)"):
        reopen(Path("s"), "images/digits", ["train.epochs=2", "optimizer.lr=1e-3,3e-4"])
    assert [point.name for point in select(reopen(Path("s"), None, [])).points] == ["seed=1"]
    longer = reopen(Path("s"), "images/digits", ["train.epochs=3", "seed=0,1", "observe.every=7"])
    assert longer.changes == ["train.epochs=3", "observe.every=7"]
    assert [point.name for point in select(longer).points] == ["seed=0", "seed=1"]
    assert Sweep.read(Path("s")).changes == longer.changes


def test_a_point_whose_directory_was_removed_is_prepared_again(folder: Path):
    sweep = planned("seed=0,1", "optimizer.lr=0.5").write(Path("s"))
    before = load_recipe(Path("s/seed=1/recipe.yaml")).values
    shutil.rmtree("s/seed=1")
    sweep.restore(select(sweep).points)
    assert load_recipe(Path("s/seed=1/recipe.yaml")).values == before


WORDS = ["training.numb_steps=40,60", "loss.limit_pref_v=0,1", "sweep.how=zip"]
"""For an input of DeePMD-kit, in its own keys."""


def test_points_of_an_input_of_another_program_are_for_as_many_ranks_as_train_them(folder: Path):
    deepmd_input.write(folder)
    sweep = plan("input.json", WORDS, ["isoscale", "sweep"], check_components=False, world=2).write(Path("s"))
    batches = [load_recipe(sweep.folder(point) / "recipe.yaml").recipe.data.batch_size for point in sweep.points]
    assert batches == [2, 2], "1 for each worker in the file"
    assert reopen(Path("s"), "input.json", WORDS).changes == []


def test_a_point_of_an_input_of_another_program_is_prepared_again(folder: Path):
    deepmd_input.write(folder, loss__limit_pref_v=1)
    sweep = plan("input.json", WORDS, ["isoscale", "sweep"], check_components=False, world=2).write(Path("s"))
    before = [load_recipe(sweep.folder(point) / "recipe.yaml").values for point in sweep.points]
    for point in sweep.points:
        shutil.rmtree(sweep.folder(point))
    Sweep.read(Path("s")).restore(sweep.points)
    assert [load_recipe(sweep.folder(point) / "recipe.yaml").values for point in sweep.points] == before
    assert "virial" not in before[0]["task"]["labels"] and "virial" in before[1]["task"]["labels"]


def test_what_points_of_an_input_differ_in_is_not_changed_by_its_name_in_the_recipe(folder: Path):
    deepmd_input.write(folder)
    plan("input.json", WORDS, ["isoscale", "sweep"], check_components=False).write(Path("s"))
    with pytest.raises(UserError, match=r"train\.steps: 40 → 100"):
        reopen(Path("s"), None, ["train.steps=100"])


def test_values_that_were_not_finite_are_never_the_best(folder: Path):
    sweep = planned("seed=0,1").write(Path("s"))
    finish(sweep, "seed=0", 0.25)
    with Run("s/seed=0").directory.metrics.open("a") as file:
        file.write('{"step": 5, "epoch": 0, "name": "val/accuracy", "value": null, "text": "nan", "time": 0}\n{"st')
    (state, _) = states_of(sweep)
    assert (state.step, state.best) == (5, 0.25) and not math.isnan(state.best)
