"""`isoscale init`: what it makes works at once, and what it refuses leaves nothing behind."""

import json
import sys
from pathlib import Path

import pytest

from isoscale.cli.train import init
from tests import warm
from tests.helpers import cli

FILES = {
    ".gitignore", "README.md", "recipe.yaml", "tests/test_train.py",
    "my_balls/__init__.py", "my_balls/data.py", "my_balls/model.py",
}  # fmt: skip


def held(folder: Path) -> set[str]:
    """The files in a folder, by their paths."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_it_makes_a_project_and_says_what_to_type(isoscale, tmp_path: Path):
    made = isoscale("init", "my-balls")
    assert made.code == 0 and held(tmp_path / "my-balls") == FILES
    assert all(f"\n  {file}" in made.out for file in FILES)
    assert made.out.endswith("next:\n  cd my-balls\n  isoscale train recipe.yaml\n  python -m pytest\n")


def test_the_project_speaks_of_itself_by_its_own_name(isoscale, tmp_path: Path):
    isoscale("init", "my-balls")
    texts = {path: (tmp_path / "my-balls" / path).read_text() for path in FILES}
    assert not [path for path, text in texts.items() if "my-project" in text or "my_project" in text]
    assert texts["README.md"].startswith("# my-balls\n") and "my_balls.data.Throws" in texts["recipe.yaml"]
    assert {"runs/", "data/"} <= set(texts[".gitignore"].split())


def test_its_recipe_passes_the_check_and_its_model_can_be_looked_at(isoscale, tmp_path: Path, monkeypatch):
    isoscale("init", "checked-balls")
    monkeypatch.chdir(tmp_path / "checked-balls")
    assert isoscale("recipe", "check", "recipe.yaml").out == "checked-balls: ok\n"
    assert "layers.4  Linear  1               65" in isoscale("recipe", "model", "recipe.yaml").out


def test_it_goes_where_it_is_told_and_into_an_empty_folder(isoscale, tmp_path: Path):
    (tmp_path / "there/my-balls").mkdir(parents=True)
    assert "cd there/my-balls\n" in isoscale("init", "my-balls", "--path", "there").out
    assert held(tmp_path / "there/my-balls") == FILES


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torch", 'cannot be called "torch": there is a module of that name already; type: isoscale init my-torch'),
        ("JSON", "there is a module of that name already"),
        ("isoscale", "there is a module of that name already"),
        ("__main__", "there is a module of that name already"),
        ("class", "it is a word of Python's own; type: isoscale init my-class"),
        ("3balls", "does not begin with a digit; type: isoscale init my-3balls"),
        ("big balls!", "is made of letters, digits and _; type: isoscale init my-big-balls"),
        ("tests", "has a folder of that name for something else"),
        ("data", "has a folder of that name for something else"),
        ("some/where", "is a path; type: isoscale init where --path some"),
        ("..", "is not a name; type: isoscale init my-project"),
        ("", "is not a name; type: isoscale init my-project"),
    ],
)
def test_a_name_that_cannot_be_a_package_is_refused_with_one_that_can(isoscale, tmp_path: Path, name, words):
    refused = isoscale("init", name)
    assert refused.code == 2 and words in refused.err and refused.out == ""
    assert not list(tmp_path.iterdir())


def test_what_lies_in_the_working_folder_does_not_take_the_name(isoscale, tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "balls").mkdir()
    (tmp_path / "throws.py").touch()
    assert isoscale("init", "balls").code == 0
    assert isoscale("init", "throws").code == 0


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda path: (path.mkdir(), (path / "thesis.tex").touch()), "is not empty"),
        (lambda path: path.touch(), "is a file"),
    ],
)
def test_what_is_there_already_is_left_alone(isoscale, tmp_path: Path, prepare, words):
    prepare(tmp_path / "my-balls")
    before = held(tmp_path)
    refused = isoscale("init", "my-balls")
    assert refused.code == 2 and f"my-balls {words}; choose another name" in refused.err
    assert held(tmp_path) == before


def test_a_place_that_is_not_there_or_may_not_be_written_is_refused(isoscale, tmp_path: Path):
    assert "there is no folder nowhere" in isoscale("init", "my-balls", "--path", "nowhere").err
    locked = isoscale("init", "my-balls", "--path", "/proc")
    assert locked.code == 2 and "cannot make /proc/my-balls: " in locked.err and "--path DIR" in locked.err
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_on_the_way_leaves_nothing_behind(isoscale, tmp_path: Path, monkeypatch):
    write_text, written = Path.write_text, []

    def fill_up(path: Path, *words: str, **options: str) -> int:
        written.append(path)
        if len(written) == 4:
            raise OSError(28, "No space left on device")
        return write_text(path, *words, **options)

    monkeypatch.setattr(init.Path, "write_text", fill_up)
    refused = isoscale("init", "my-balls")
    assert refused.code == 2 and "No space left on device" in refused.err
    assert len(written) == 4 and not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def balls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project as a user makes it."""
    folder = tmp_path_factory.mktemp("user")
    assert cli("init", "my-balls", cwd=folder).returncode == 0
    return folder / "my-balls"


@pytest.mark.slow
def test_it_trains_at_once_to_a_good_value(balls: Path):
    trained = cli("train", "recipe.yaml", cwd=balls)
    assert trained.returncode == 0, trained.stderr
    (run,) = (balls / "runs").iterdir()
    assert run.name.startswith("my-balls-")
    tested = json.loads(cli("test", "--json", cwd=balls).stdout)
    assert tested["test/mae"] < 1  # metre, of some forty


@pytest.mark.slow
def test_its_own_tests_pass_and_fail_where_nothing_is_learned(balls: Path):
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    passed = warm.run(words, cwd=balls, capture_output=True, text=True)
    assert passed.returncode == 0 and "2 passed" in passed.stdout, passed.stdout
    recipe = balls / "recipe.yaml"
    text = recipe.read_text()
    recipe.write_text(text.replace("lr: 1e-2", "lr: 1e-30"))
    failed = warm.run(words, cwd=balls, capture_output=True, text=True)
    recipe.write_text(text)
    assert "test_the_loss_falls" in failed.stdout and "1 failed, 1 passed" in failed.stdout
