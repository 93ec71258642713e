import json
import os
from pathlib import Path

import pytest
import torch

from isoscale.observe import doctor, machine


@pytest.fixture(autouse=True)
def _data_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ISOSCALE_DATA", raising=False)


def findings(check) -> dict[str, doctor.Finding]:
    return {finding.subject: finding for finding in check()}


def test_a_machine_that_can_train_is_said_to_be_ready(isoscale):
    shown = isoscale("doctor")
    lines = {line.split()[1]: line for line in shown.out.splitlines()}
    assert shown.code == 0 and lines["torch"].startswith(f"ok       torch          {torch.__version__}")
    assert {"python", "isoscale", "device", "training", "cpu", "memory", "tensorboard", "extras", "data"} <= set(lines)
    assert "cpu: " in lines["training"] and " ms" in lines["training"]


def test_programs_read_the_findings(isoscale):
    shown = isoscale("doctor", "--json")
    told = json.loads(shown.out)
    assert told["ok"] is (shown.code == 0)
    assert all(finding.keys() == {"subject", "verdict", "text", "advice"} for finding in told["findings"])
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
    assert "resnet18-imagenet" in isoscale("doctor").out.splitlines()[-1]


def test_a_data_folder_that_may_only_be_read_is_no_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_refusal", lambda folder: "Read-only file system")
    assert doctor.folder("data folder", tmp_path, must_be_writable=False).verdict == "warning"
    assert doctor.folder("runs folder", tmp_path / "new", must_be_writable=True).verdict == "problem"


def test_a_folder_that_is_almost_full_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert doctor.folder("runs folder", tmp_path / "not" / "yet", must_be_writable=True).verdict == "ok"
    assert not (tmp_path / "not").exists()
    monkeypatch.setattr(doctor, "ENOUGH_DISK", 1e18)
    assert doctor.folder("runs folder", tmp_path, must_be_writable=True).advice.startswith("make room")


def test_a_driver_that_torch_cannot_use_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "NVIDIA_DRIVER", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    without = findings(doctor.devices)["device"]
    assert without.verdict == "warning" and "built without CUDA" in without.text and without.advice
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    unusable = findings(doctor.devices)["device"]
    assert unusable.verdict == "problem" and "CUDA_VISIBLE_DEVICES" in unusable.advice


def test_a_device_that_cannot_compute_is_a_problem(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_accelerators", lambda: [torch.device("meta")])
    steps = list(doctor.training_step())
    assert [step.verdict for step in steps] == ["ok", "problem"] and steps[1].text.startswith("meta: ")


def test_a_device_that_computes_wrong_numbers_is_a_problem(monkeypatch: pytest.MonkeyPatch):
    multiply = torch.matmul
    monkeypatch.setattr(torch, "matmul", lambda left, right: multiply(left, 1.1 * right))
    (step,) = doctor.training_step()
    assert step.verdict == "problem" and "the gradients add up to" in step.text


def test_more_threads_than_cores_are_a_warning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "usable_cores", lambda: 1.5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    finding = findings(doctor.cores)["cpu"]
    assert finding.verdict == "warning" and finding.text.startswith("1.5 of ")
    assert finding.advice.startswith("export OMP_NUM_THREADS=1:")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert findings(doctor.cores)["cpu"].verdict == "ok"


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "usable_memory", lambda: 2**29)
    finding = findings(doctor.memory)["memory"]
    assert finding.verdict == "warning" and "limited to 0.5 GiB by a control group" in finding.text


def test_a_machine_without_a_compiler_or_tensorboard_is_told_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert findings(doctor.compiler)["compiler"].text == "no C++ compiler"
    monkeypatch.setitem(doctor.sys.modules, "torch.utils.tensorboard", None)
    assert findings(doctor.tensorboard)["tensorboard"].verdict == "problem"


def test_the_extras_of_the_package_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    requires = ["torch", "pytest; extra == 'test'", 'no-such-package>=1; extra == "crystals"']
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: requires)
    assert findings(doctor.extras)["extras"].text == "installed: test; not: crystals"


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
