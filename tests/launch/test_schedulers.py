"""Schedulers: one class each, found by its module; commands as small scripts on the path say what real ones do.

The real Slurm is in tests/cluster.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from isoscale.errors import UserError
from isoscale.launch.schedulers import find, slurm
from isoscale.launch.schedulers.slurm import Slurm
from isoscale.observe.doctor.finding import Finding
from tests.cli.conftest import isoscale

__all__ = ["isoscale"]

PACKAGE = Path(find.__file__).parents[2]
HOMES = ("launch/schedulers/", "parallel/environments/")
"""Where a scheduler may be meant; everywhere else, code asks the `Scheduler` or the `BatchJob`."""
COMMANDS = re.compile(r"SLURM_|SBATCH|\b(sbatch|squeue|scancel|sacct|scontrol|sinfo)\b")
"""What only one scheduler has: variables and commands. (srun is a launcher, which messages name beside mpirun.)"""
OLD_NAMES = "system/moved.py"


def outside() -> Iterator[tuple[str, ast.AST]]:
    """Every node of the source outside the homes of schedulers, docstrings aside."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(HOMES) or name == OLD_NAMES:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        yield from ((f"{name}:{getattr(node, 'lineno', 0)}", node) for node in ast.walk(tree) if id(node) not in said)


def names(node: ast.AST) -> list[str]:
    """The names that a node gives or uses."""
    found = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "module", "asname")]
    return [name for name in found if isinstance(name, str)]


@pytest.mark.slow
def test_one_scheduler_is_named_only_where_schedulers_live():
    """No name with `slurm` in it, no command or variable of Slurm, no folder `slurm`: messages may say Slurm."""
    wrong = []
    for where, node in outside():
        wrong += [f"{where}: {name}" for name in names(node) if "slurm" in name.lower()]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_wrong = COMMANDS.search(node.value) or "slurm" in re.split(r"[/.]", node.value)
            wrong += [f"{where}: {node.value!r}"] * bool(is_wrong)
    assert wrong == []


def test_every_module_of_the_folder_has_its_scheduler():
    modules = {path.stem for path in (PACKAGE / "launch/schedulers").glob("*.py")} - {"__init__", "base", "find"}
    assert set(find.schedulers()) == modules


def test_auto_is_what_is_there_and_a_name_that_is_not_known_is_refused_with_the_nearest():
    assert isinstance(find.find(), Slurm) and find.find("slurm") is find.find()
    with pytest.raises(UserError, match=r'there is no scheduler "slrum"; did you mean "slurm"\?'):
        find.find("slrum")


def test_a_recipe_names_its_scheduler(isoscale):
    refused = isoscale("submit", "images/digits", "launch.scheduler=slrum", "--dry-run")
    assert refused.code == 2 and 'did you mean "slurm"?' in refused.err
    assert "#SBATCH" in isoscale("submit", "images/digits", "--scheduler", "slurm", "--dry-run").out


@pytest.mark.parametrize("command", ["submit", "sweep", "scale"])
def test_every_key_of_the_launch_section_is_an_option(isoscale, monkeypatch: pytest.MonkeyPatch, command: str):
    from isoscale.recipe.launch import Launch

    monkeypatch.setenv("COLUMNS", "200")
    shown = isoscale(command, "--help").out
    for key in Launch.model_fields:
        assert f"--{'-'.join(key.split('_'))}".removesuffix("s") in shown, key


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the only one in which programs are looked for."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("SLURM_JOB_ID", *slurm.JOB_COUNTS):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def put(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def only(findings) -> Finding:
    (found,) = findings
    return found


def test_a_machine_without_slurm_is_fine(programs: Path):
    assert only(Slurm().findings()) == Finding("slurm", "ok", "not on this machine")
    with pytest.raises(UserError, match="there is no Slurm on this machine: the command sbatch was not found"):
        Slurm().submit_held("")


def test_what_a_command_says_stands_in_the_refusal(programs: Path):
    put(programs, "scancel", "echo 'Invalid job id' >&2; exit 1")
    with pytest.raises(UserError, match="Slurm does not cancel job 7:\n  Invalid job id"):
        Slurm().cancel("7")


def test_a_job_that_left_the_queue_is_looked_up_in_the_accounting(programs: Path):
    put(programs, "squeue", "exit 1")
    assert Slurm().state("7") is None
    put(programs, "sacct", "echo 'CANCELLED by 0|n1|00:01:00|00:10:00|2030-01-01T00:00:00'")
    found = Slurm().state("7")
    assert found is not None and (found.state, found.is_active, found.elapsed) == ("CANCELLED", False, "00:01:00")
    put(programs, "squeue", "echo 'RUNNING|None|n1|0:10|10:00|2030-01-01T00:00:00'")
    found = Slurm().state("7")
    assert found is not None and found.is_active and found.reason == "n1"


def test_a_controller_that_is_down_is_a_warning_in_its_own_words(programs: Path):
    put(programs, "sbatch", "")
    put(programs, "scontrol", "echo 'Slurmctld(primary) at login is DOWN'")
    found = only(Slurm().findings())
    assert found.verdict == "warning" and found.text.endswith("Slurmctld(primary) at login is DOWN")
    assert "isoscale submit" in found.advice


def test_a_controller_that_hangs_is_waited_for_no_longer_than_said(programs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slurm, "ANSWER", 0.3)
    put(programs, "sbatch", "")
    put(programs, "scontrol", "/bin/sleep 3; echo 'Slurmctld(primary) at login is UP'")
    assert only(Slurm().findings()).text.endswith("no answer within 0.3 s")


def test_a_controller_that_is_up_is_told_with_partitions_and_accounting(programs: Path):
    put(programs, "sbatch", "echo 'slurm 24.05.1'")
    put(programs, "scontrol", "echo 'Slurmctld(primary) at login is UP'")
    put(programs, "sinfo", "echo 'batch* 3'; echo 'gpu 12'")
    put(programs, "sacct", "exit 0")
    found = only(Slurm().findings())
    assert (
        found.text
        == "slurm 24.05.1, the controller answers, partitions batch* (3 nodes), gpu (12 nodes), accounting is on"
    )
    put(programs, "sacct", "exit 1")
    assert only(Slurm().findings()).text.endswith("accounting is off")


def test_the_job_of_this_process_is_told(programs: Path, monkeypatch: pytest.MonkeyPatch):
    put(programs, "squeue", "echo '1:59:00'")
    for name, value in {"SLURM_JOB_ID": "42", "SLURM_NTASKS": "8", "SLURM_GPUS_ON_NODE": "4"}.items():
        monkeypatch.setenv(name, value)
    _, job = Slurm().findings()
    assert job.text == "42, tasks 8, GPUs on this node 4, time left 1:59:00"
