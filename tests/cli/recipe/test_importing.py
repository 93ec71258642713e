"""`isoscale recipe import`: what it prints, writes and leaves alone."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from isoscale.cli.recipe.recipe import app
from isoscale.errors import UserError
from isoscale.recipe.load import load_recipe
from tests.helpers import cli

FILES = Path(__file__).parents[2] / "science/electronic/mala/files"


def run(*words: str | Path) -> Result:
    result = CliRunner().invoke(app, ["import", *map(str, words)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_recipe_that_is_printed_stands_alone_on_its_stream(tmp_path: Path):
    result = run(FILES / "be2.params.json")
    (tmp_path / "recipe.yaml").write_text(result.stdout)
    assert load_recipe(tmp_path / "recipe.yaml").recipe.data.batch_size == 40
    assert "data.use_fast_tensor_data_set: batches are gathered whole" in result.stderr
    assert "to do by hand:\n  data.snapshot_directories_list: there is no folder Be2 here" in result.stderr


def test_a_recipe_is_written_and_says_what_to_type_next(tmp_path: Path):
    for name in ("be2.params.json", "be2-small.network.pth"):
        shutil.copy(FILES / name, tmp_path / name.replace("-small", ""))
    out = tmp_path / "my recipe.yaml"
    result = run(tmp_path, "--out", out, "--data", tmp_path)
    assert load_recipe(out).values["data"]["path"] == str(tmp_path)
    train = f"isoscale train '{out}'"
    assert f"next:\n  {train}\n  {train} task.init_from={tmp_path}/be2.network.pth\n" in result.stdout
    assert "by hand" not in result.stdout


def test_a_file_that_is_there_stays_as_it_is(tmp_path: Path):
    out = tmp_path / "recipe.yaml"
    out.write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        run(FILES / "be2.params.json", "--out", out)
    assert out.read_text() == "mine"
    with pytest.raises(UserError, match="cannot write"):
        run(FILES / "be2.params.json", "--out", tmp_path / "no folder/recipe.yaml")


def test_a_value_that_no_recipe_may_have_is_said_before_anything_is_written(tmp_path: Path):
    text = (FILES / "be2.params.json").read_text().replace('"mini_batch_size": 40', '"mini_batch_size": -1')
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(UserError, match=r"data\.batch_size"):
        run(tmp_path / "odd.json", "--out", tmp_path / "recipe.yaml")
    assert not (tmp_path / "recipe.yaml").exists()


def test_a_mistake_ends_with_exit_code_2_and_words(tmp_path: Path):
    done = cli("recipe", "import", "gone.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "error: cannot read gone.json: No such file or directory\n")
