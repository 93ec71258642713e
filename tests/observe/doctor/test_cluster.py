"""MPI and Slurm as small scripts on the path say what real ones do; the real ones are in tests/cluster."""

from pathlib import Path

import pytest

from isoscale.observe.doctor import cluster
from isoscale.observe.doctor.finding import Finding


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the only one in which programs are looked for."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("SLURM_JOB_ID", *cluster.JOB_COUNTS):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def put(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def only(findings) -> Finding:
    (found,) = findings
    return found


def test_a_machine_without_mpi_or_slurm_is_fine(programs: Path):
    assert only(cluster.mpi()) == Finding("mpi", "ok", "no mpirun on this machine")
    assert only(cluster.slurm()) == Finding("slurm", "ok", "not on this machine")


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
    assert only(cluster.mpi()).text == f"{name}, {programs}/mpiexec"


@pytest.mark.parametrize("script", ["exit 1", "/bin/sleep 3; echo 'mpirun (Open MPI) 5.0.3'"], ids=["fails", "hangs"])
def test_an_mpi_that_does_not_answer_is_a_warning(programs: Path, monkeypatch: pytest.MonkeyPatch, script: str):
    monkeypatch.setattr(cluster, "ANSWER", 0.3)
    put(programs, "mpirun", script)
    found = only(cluster.mpi())
    assert found.verdict == "warning" and "does not tell its version" in found.text


def test_a_controller_that_is_down_is_a_warning_in_its_own_words(programs: Path):
    put(programs, "sbatch", "")
    put(programs, "scontrol", "echo 'Slurmctld(primary) at login is DOWN'")
    found = only(cluster.slurm())
    assert found.verdict == "warning" and found.text.endswith("Slurmctld(primary) at login is DOWN")
    assert "isoscale submit" in found.advice


def test_a_controller_that_hangs_is_waited_for_no_longer_than_said(programs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cluster, "ANSWER", 0.3)
    put(programs, "sbatch", "")
    put(programs, "scontrol", "/bin/sleep 3; echo 'Slurmctld(primary) at login is UP'")
    assert only(cluster.slurm()).text.endswith("no answer within 0.3 s")


def test_a_controller_that_is_up_is_told_with_partitions_and_accounting(programs: Path):
    put(programs, "sbatch", "echo 'slurm 24.05.1'")
    put(programs, "scontrol", "echo 'Slurmctld(primary) at login is UP'")
    put(programs, "sinfo", "echo 'batch* 3'; echo 'gpu 12'")
    put(programs, "sacct", "exit 0")
    found = only(cluster.slurm())
    assert (
        found.text
        == "slurm 24.05.1, the controller answers, partitions batch* (3 nodes), gpu (12 nodes), accounting is on"
    )
    put(programs, "sacct", "exit 1")
    assert only(cluster.slurm()).text.endswith("accounting is off")


def test_the_job_of_this_process_is_told(programs: Path, monkeypatch: pytest.MonkeyPatch):
    put(programs, "squeue", "echo '1:59:00'")
    for name, value in {"SLURM_JOB_ID": "42", "SLURM_NTASKS": "8", "SLURM_GPUS_ON_NODE": "4"}.items():
        monkeypatch.setenv(name, value)
    _, job = cluster.slurm()
    assert job.text == "42, tasks 8, GPUs on this node 4, time left 1:59:00"
