import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from isoscale.observe.doctor import checks
from isoscale.observe.doctor.finding import Finding
from isoscale.parallel.health.rendezvous import free_port
from isoscale.system import machine
from tests import warm
from tests.helpers import cli


@pytest.fixture(autouse=True)
def _data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISOSCALE_DATA", raising=False)


def findings(check) -> dict[str, Finding]:
    return {finding.subject: finding for finding in check()}


def test_a_machine_that_can_train_is_said_to_be_ready(isoscale):
    shown = isoscale("doctor")
    lines = {line.split()[1]: line for line in shown.out.splitlines()}
    assert shown.code == 0 and lines["torch"].startswith(f"ok       torch          {torch.__version__}")
    assert {"python", "isoscale", "device", "training", "cpu", "memory", "tensorboard", "extras", "data"} <= set(lines)
    assert {"collectives", "mpi", "runs", "slurm", "launcher"} <= set(lines) and "Gloo" in lines["collectives"]
    assert "cpu: " in lines["training"] and " ms" in lines["training"]


def test_programs_read_the_findings(isoscale):
    shown = isoscale("doctor", "--json")
    told = json.loads(shown.out)
    assert told["ok"] is (shown.code == 0)
    assert all(finding.keys() == {"subject", "verdict", "host", "text", "advice"} for finding in told["findings"])
    assert {"runs folder", "data folder"} <= {finding["subject"] for finding in told["findings"]}


def test_a_problem_is_named_with_what_to_do_and_ends_with_2(isoscale, tmp_path: Path):
    (tmp_path / "runs").write_text("a file where the folder should be")
    shown = isoscale("doctor")
    (line,) = [line for line in shown.out.splitlines() if line.startswith("problem")]
    assert shown.code == 2 and "runs folder" in line and "work in another folder" in line
    assert json.loads(isoscale("doctor", "--json").out)["ok"] is False


def test_the_data_sets_that_are_there_are_named(isoscale, tmp_path: Path):
    (tmp_path / "data/weights").mkdir(parents=True)
    (tmp_path / "data/weights/resnet18-f37072fd.pth").touch()
    (line,) = [line for line in isoscale("doctor").out.splitlines() if line.startswith("ok       data  ")]
    assert "resnet18-imagenet" in line


def test_a_driver_that_torch_cannot_use_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "NVIDIA_DRIVER", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    without = findings(checks.devices)["device"]
    assert without.verdict == "warning" and "built without CUDA" in without.text and without.advice
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    unusable = findings(checks.devices)["device"]
    assert unusable.verdict == "problem" and "CUDA_VISIBLE_DEVICES" in unusable.advice


def test_a_device_that_cannot_compute_is_a_problem(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "accelerators", lambda: [torch.device("meta")])
    steps = list(checks.training_step())
    assert [step.verdict for step in steps] == ["ok", "problem"] and steps[1].text.startswith("meta: ")


def test_a_device_that_computes_wrong_numbers_is_a_problem(monkeypatch: pytest.MonkeyPatch):
    multiply = torch.matmul
    monkeypatch.setattr(torch, "matmul", lambda left, right: multiply(left, 1.1 * right))
    (step,) = checks.training_step()
    assert step.verdict == "problem" and "the gradients add up to" in step.text


def test_more_threads_than_cores_are_a_warning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "usable_cores", lambda: 1.5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    finding = findings(checks.cores)["cpu"]
    assert finding.verdict == "warning" and finding.text.startswith("1.5 of ")
    assert finding.advice.startswith("export OMP_NUM_THREADS=1:")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert findings(checks.cores)["cpu"].verdict == "ok"


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "usable_memory", lambda: 2**29)
    finding = findings(checks.memory)["memory"]
    assert finding.verdict == "warning" and "limited to 0.5 GiB by a control group" in finding.text


def test_a_machine_without_a_compiler_or_tensorboard_is_told_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks.shutil, "which", lambda name: None)
    assert findings(checks.compiler)["compiler"].text == "no C++ compiler"
    monkeypatch.setitem(checks.sys.modules, "torch.utils.tensorboard", None)
    assert findings(checks.tensorboard)["tensorboard"].verdict == "problem"


def test_the_extras_of_the_package_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    requires = ["torch", "pytest; extra == 'test'", 'no-such-package>=1; extra == "crystals"']
    monkeypatch.setattr(checks.importlib.metadata, "requires", lambda name: requires)
    assert findings(checks.extras)["extras"].text == "installed: test; not: crystals"


def test_a_package_that_is_not_installed_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch):
    def requires(name: str) -> list[str]:
        raise checks.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(checks.importlib.metadata, "requires", requires)
    assert findings(checks.extras)["extras"].verdict == "warning"


def test_a_torch_without_gloo_is_said_to_train_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.distributed, "is_gloo_available", lambda: False)
    assert "one process trains" in findings(checks.collectives)["collectives"].advice


def test_what_contradicts_itself_in_the_environment_is_a_problem_and_not_the_end(isoscale, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    shown = isoscale("doctor")
    assert shown.code == 2 and "problem  launcher       RANK is set, but WORLD_SIZE is not" in shown.out
    assert "ok       torch" in shown.out and shown.err == ""


def test_a_process_alone_in_a_job_of_several_tasks_is_told_about_srun(isoscale, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    shown = isoscale("doctor")
    assert shown.code == 0 and "warning  launcher       Slurm job 7 has 4 tasks" in shown.out
    assert "ok       slurm job      7, tasks 4" in shown.out


@pytest.mark.slow
def test_ranks_of_one_machine_give_one_report(tmp_path: Path):
    done = cli("doctor", "--devices", "2", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)["findings"]
    found = {finding["subject"]: finding["text"] for finding in told}
    assert done.returncode == 0 and len([finding for finding in told if finding["subject"] == "torch"]) == 1
    assert "2 ranks on" in found["launcher"] and found["ranks"].startswith("ranks 0, 1: ")
    assert " µs for one number" in found["all-reduce"] and " GB/s for 64 MB" in found["all-reduce"]


RANK = """
import sys
import isoscale._version as version
version.__version__ = sys.argv.pop()
from isoscale.cli.main import run
sys.argv = ["isoscale", "doctor"]
run()
"""


def rank(number: int, port: int, folder: Path, version: str = "1", world: int = 2) -> "subprocess.Popen[str]":
    """A process that was told to be one of several, with a version of isoscale of its own."""
    told = {"RANK": str(number), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return warm.Popen(
        [sys.executable, "-c", RANK, version], cwd=folder, env={**os.environ, **told, "ISOSCALE_JOIN_TIMEOUT": "4"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_ranks_with_different_versions_are_a_problem(tmp_path: Path):
    port = free_port()
    running = [rank(number, port, tmp_path, version) for number, version in enumerate(["1.0", "2.0"])]
    shown = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [2, 0] and shown[1] == ""
    (line,) = [line for line in shown[0].splitlines() if line.startswith("problem")]
    assert "isoscale differs between ranks: 1.0 on" in line and "2.0 on" in line and "same environment" in line


@pytest.mark.slow
def test_ranks_that_do_not_meet_each_say_what_they_know(tmp_path: Path):
    """Of three, the last never starts; another one looks where nobody is."""
    port, elsewhere = free_port(), free_port()
    running = [rank(0, port, tmp_path, world=3), rank(1, port, tmp_path, world=3), rank(1, elsewhere, tmp_path)]
    first, second, lost = (process.communicate(timeout=60)[0] for process in running)
    assert [process.returncode for process in running] == [2, 0, 2]
    assert "problem  ranks          1 of 3 ranks did not come within 4 s: rank 2" in first and "ok       torch" in first
    assert second == ""
    assert f"cannot reach rank 0 at 127.0.0.1 port {elsewhere}: Connection refused: nobody listens" in lost


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(machine, "PROCESS_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "GROUP_ROOT", tmp_path / "sys")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_tightest_limit_of_all_groups_holds(groups: Path):
    write(groups / "cgroup", "0::/job/step\n")
    write(groups / "sys/job/cpu.max", "50000 100000\n")
    write(groups / "sys/job/step/cpu.max", "max 100000\n")
    write(groups / "sys/job/memory.max", "max\n")
    write(groups / "sys/job/step/memory.max", "1048576\n")
    assert machine.usable_cores() == 0.5 and machine.usable_memory() == 1 << 20


def test_limits_of_the_older_kind_of_groups_are_read(groups: Path):
    write(groups / "cgroup", "5:memory:/slurm/job_1\n3:cpu,cpuacct:/slurm/job_1\n1:name=systemd:/x\n")
    write(groups / "sys/memory/slurm/job_1/memory.limit_in_bytes", "2097152\n")
    write(groups / "sys/cpu,cpuacct/slurm/cpu.cfs_quota_us", "25000\n")
    write(groups / "sys/cpu,cpuacct/slurm/cpu.cfs_period_us", "100000\n")
    assert machine.usable_cores() == 0.25 and machine.usable_memory() == 2 << 20


def test_a_machine_without_groups_is_limited_by_affinity_alone(groups: Path):
    assert machine.usable_cores() == len(os.sched_getaffinity(0))
    assert machine.usable_memory() == machine.total_memory()
