"""A working folder from someone else: git is asked about it, and nothing that its repository names is run."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from isoscale.runs import git
from tests.helpers import cli

SMALL = ["train.epochs=1", "observe.tensorboard=0"]
SECRET = "password=correct-horse"


def run_git(folder: Path, *words: str) -> None:
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "protocol.file.allow=always", *words],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A commit of one file, which was changed since, as the working directory."""
    folder = tmp_path / "repository"
    folder.mkdir()
    run_git(folder, "init", "--quiet")
    (folder / "model.py").write_text("width = 1\n")
    (folder / "same.py").touch()
    run_git(folder, "add", ".")
    run_git(folder, "commit", "--quiet", "-m", "first")
    (folder / "model.py").write_text("width = 2\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program that leaves a mark, and passes on what it reads."""
    path = tmp_path / "program"
    path.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\nexec cat\n")
    path.chmod(0o755)
    return path


def a_monitor(folder: Path, program: Path) -> None:
    run_git(folder, "config", "core.fsmonitor", str(program))


def a_hook(folder: Path, program: Path) -> None:
    run_git(folder, "config", "core.hooksPath", str(folder / "hooks"))
    (folder / "hooks").mkdir()
    (folder / "hooks/post-index-change").symlink_to(program)
    os.utime(folder / "same.py", (1, 1))


def a_driver(folder: Path, program: Path) -> None:
    (folder / ".gitattributes").write_text("* diff=own\n")
    run_git(folder, "config", "diff.own.command", str(program))


def a_difference(folder: Path, program: Path) -> None:
    run_git(folder, "config", "diff.external", str(program))


def a_conversion(folder: Path, program: Path) -> None:
    (folder / ".gitattributes").write_text("* diff=own\n")
    run_git(folder, "config", "diff.own.textconv", str(program))


def a_filter(folder: Path, program: Path) -> None:
    (folder / ".gitattributes").write_text("* filter=own\n")
    run_git(folder, "config", "filter.own.clean", str(program))
    run_git(folder, "config", "filter.own.required", "true")


def a_filter_in_an_included_file(folder: Path, program: Path) -> None:
    (folder / ".gitattributes").write_text("* filter=an.own\n")
    (folder / ".git/more").write_text(f'[filter "an.own"]\n\tclean = {program}\n')
    run_git(folder, "config", "include.path", "more")


def a_filter_whose_name_is_no_text(folder: Path, program: Path) -> None:
    (folder / ".gitattributes").write_bytes(b"* filter=\xff\n")
    with (folder / ".git/config").open("ab") as file:
        file.write(b'[filter "\xff"]\n\tclean = ' + bytes(program) + b"\n")


def a_filter_whose_name_looks_like_a_setting(folder: Path, program: Path) -> None:
    (folder / ".gitattributes").write_text("* filter=a=b\n")
    run_git(folder, "config", "filter.a=b.clean", str(program))


def a_filter_that_is_asked_many_times(folder: Path, program: Path) -> None:
    (folder / ".gitattributes").write_text("* filter=own\n")
    run_git(folder, "config", "filter.own.process", str(program))


def a_missing_object(folder: Path, program: Path) -> None:
    run_git(folder, "config", "core.repositoryFormatVersion", "1")
    run_git(folder, "config", "extensions.partialClone", "origin")
    run_git(folder, "config", "remote.origin.url", f"ext::{program}")
    run_git(folder, "config", "remote.origin.promisor", "true")
    run_git(folder, "config", "protocol.allow", "always")
    blob = subprocess.check_output(["git", "rev-parse", "HEAD:model.py"], cwd=folder, text=True).strip()
    (folder / ".git/objects" / blob[:2] / blob[2:]).unlink()


def a_part_of_its_own(folder: Path, program: Path) -> None:
    (inner := folder.parent / "inner").mkdir()
    run_git(inner, "init", "--quiet")
    run_git(inner, "commit", "--quiet", "--allow-empty", "-m", "first")
    run_git(folder, "submodule", "add", "--quiet", str(inner), "part")
    run_git(folder, "commit", "--quiet", "-m", "with a part")
    run_git(folder / "part", "config", "core.fsmonitor", str(program))
    (folder / "part/new").touch()


def a_program_called_git(folder: Path, program: Path) -> None:
    (folder / "git").symlink_to(program)
    os.environ["PATH"] = f".:{os.environ['PATH']}"


ATTACKS = [
    a_monitor, a_hook, a_driver, a_difference, a_conversion, a_filter, a_filter_in_an_included_file,
    a_filter_whose_name_is_no_text, a_filter_whose_name_looks_like_a_setting, a_filter_that_is_asked_many_times,
    a_missing_object, a_part_of_its_own, a_program_called_git,
]  # fmt: skip
WITHOUT_CHANGES = (a_filter_whose_name_looks_like_a_setting, a_missing_object)
"""Where git cannot tell the changes without them."""


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_that_a_repository_names_is_run(
    attack: Callable[[Path, Path], None], repository: Path, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])
    attack(repository, program)
    (program.parent / "ran").unlink(missing_ok=True)
    found = git.code()
    assert not (program.parent / "ran").exists()
    assert found is not None
    assert attack in WITHOUT_CHANGES or "+width = 2" in found["diff"]


def test_a_repository_that_claims_another_folder_shows_nothing_of_it(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(SECRET)  # the user's own, under a name that the repository guesses
    run_git(repository, "config", "core.worktree", str(tmp_path))
    assert git.code() is None


def test_a_second_work_tree_and_a_folder_below_are_known(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_git(repository, "worktree", "add", "--quiet", "../second")
    (repository.parent / "second/deep").mkdir()
    monkeypatch.chdir(repository.parent / "second/deep")
    found = git.code()
    assert found is not None
    assert (found["folder"], found["diff"]) == (str(repository.parent / "second"), "")


def test_variables_of_another_repository_do_not_count(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a hook, where git has set them."""
    run_git(tmp_path, "init", "--quiet", "other")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other/.git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "other/index"))
    found = git.code()
    assert found is not None and found["folder"] == str(repository)


def test_names_of_changed_files() -> None:
    diff = 'diff --git a/x b/x\n+diff --git a/y b/y\ndiff --git a/my model.py b/my model.py\ndiff --git "a/\\t" "b/\\t"'
    assert git.changed_files(diff) == ["x", "my model.py", "\\t"]


def test_uncommitted_changes_are_kept_and_shown_only_with_a_word(repository: Path) -> None:
    (repository / "model.py").write_text(SECRET)
    trained = cli("train", "images/digits", *SMALL, "--run", "run", cwd=repository)
    assert "run.json keeps the uncommitted changes of 1 file (model.py); reports show them" in trained.stdout
    told = cli("report", "run", "--no-figures", cwd=repository)
    page = repository / "run/report.html"
    assert "it shows uncommitted changes of 1 file (model.py); to leave them out: --no-diff" in told.stderr
    assert SECRET in page.read_text()
    silent = cli("report", "run", "--no-figures", "--no-diff", cwd=repository)
    assert "uncommitted" not in silent.stderr and SECRET not in page.read_text()
