"""MPI as small scripts on the path says what a real one does; the real ones are in tests/cluster."""

from pathlib import Path

import pytest

from isoscale.observe.doctor import checks
from isoscale.observe.doctor.checks import mpi
from isoscale.observe.doctor.finding import Finding


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the only one in which programs are looked for."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def put(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def only(findings) -> Finding:
    (found,) = findings
    return found


def test_a_machine_without_mpi_is_fine(programs: Path):
    assert only(mpi()) == Finding("mpi", "ok", "no mpirun on this machine")


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("mpirun (Open MPI) 5.0.3\n\nReport bugs to", "Open MPI 5.0.3"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240515", "Intel MPI 2021.13"),
        ("HYDRA build details:\n    Version:                                 4.2.1\n", "MPICH 4.2.1"),
    ],
)
def test_the_kind_of_mpi_and_its_version_are_told(programs: Path, said: str, name: str):
    put(programs, "mpiexec", f"echo '{said}'")
    assert only(mpi()).text == f"{name}, {programs}/mpiexec"


@pytest.mark.parametrize("script", ["exit 1", "/bin/sleep 3; echo 'mpirun (Open MPI) 5.0.3'"], ids=["fails", "hangs"])
def test_an_mpi_that_does_not_answer_is_a_warning(programs: Path, monkeypatch: pytest.MonkeyPatch, script: str):
    monkeypatch.setattr(checks, "ANSWER", 0.3)
    put(programs, "mpirun", script)
    found = only(mpi())
    assert found.verdict == "warning" and "does not tell its version" in found.text
