import json
from pathlib import Path

import pytest


@pytest.fixture
def runs(copied) -> list[str]:
    """Two copies of a run, one of them slower at learning."""
    first, second = copied("runs/a"), copied("runs/b")
    recipe = second / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("lr: 0.002 ", "lr: 0.0001 "))
    return [str(first), str(second)]


def test_runs_are_compared_in_a_table_and_a_picture(isoscale, runs):
    shown = isoscale("compare", *runs)
    assert shown.code == 0 and shown.err == ""
    lines = shown.out.splitlines()
    assert lines[0].split()[:3] == ["run", "status", "step"] and lines[1].startswith("a    done")
    assert "run  optimizer.lr" in shown.out and "b          0.0001" in shown.out
    assert lines[-1] == "curves: compare.png" and Path("compare.png").stat().st_size > 10_000


def test_a_folder_stands_for_all_its_runs(isoscale, runs):
    assert isoscale("compare", "runs").out == isoscale("compare", "a", "b").out


def test_json_holds_what_the_table_shows_and_draws_only_on_demand(isoscale, runs):
    shown = json.loads(isoscale("compare", *runs, "--json", "--to", "val/accuracy=0.5").out)
    assert [run["name"] for run in shown["runs"]] == ["a", "b"]
    assert shown["runs"][0]["metrics"]["val/accuracy"]["best"] > 0.5
    assert shown["runs"][0]["reached"]["step"] in (23, 46) and shown["settings"] == {"optimizer.lr": [0.002, 0.0001]}
    assert not Path("compare.png").exists()
    assert isoscale("compare", *runs, "--json", "--out", "c.svg", "--metric", "lr").code == 0
    assert "<svg" in Path("c.svg").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["runs/a"], "two or more runs are needed to compare, found runs/a"),
        (["runs/a", "runs/zzz"], "there is no run in runs/zzz"),
        (["runs/a", "runs/b", "--metric", "val/acuracy"], "did you mean val/accuracy?"),
        (["runs/a", "runs/b", "--out", "c.gif"], "a picture is written as .png, .svg or .pdf"),
        (["runs/a", "runs/b", "--out", "nowhere/c.png"], "there is no folder nowhere"),
        (["runs/a", "runs/b", "--to", "val/loss"], "expected a metric and a number"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_what_to_type(isoscale, runs, words, message):
    refused = isoscale("compare", *words)
    assert refused.code == 2 and message in refused.err and refused.out == ""
    assert not list(Path().glob("*.png"))


def test_runs_that_have_logged_nothing_are_shown_all_the_same(isoscale, runs):
    for run in runs:
        (Path(run) / "metrics.jsonl").unlink()
    shown = isoscale("compare", *runs)
    assert shown.code == 0 and shown.out.endswith("no curves: nothing was logged yet\n")
    assert "a has logged nothing yet" in shown.out
