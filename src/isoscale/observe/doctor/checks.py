"""Look at this machine as a run will find it: interpreter, devices, cores, memory and packages."""

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from isoscale._version import __version__
from isoscale.observe.doctor.finding import GIB, Amount, Finding, in_gib
from isoscale.system.devices import Cuda, every, nccl_version, of
from isoscale.system.machine import total_memory, usable_cores, usable_memory

ENOUGH_MEMORY = 2 * GIB
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
STEP_SIZE = 512


def examine() -> Iterator[Finding]:
    """Every finding about this machine, as it is made."""
    for check in CHECKS:
        yield from check()


def python_version() -> Iterator[Finding]:
    """The interpreter and the packages that everything stands on."""
    supported = (3, 11) <= sys.version_info[:2] < (3, 14)
    advice = "" if supported else "use Python 3.11, 3.12 or 3.13"
    yield Finding("python", "ok" if supported else "problem", f"{platform.python_version()}, {sys.executable}", advice)
    yield Finding("isoscale", "ok", f"{__version__}, {Path(__file__).parents[2]}")


def torch_build() -> Iterator[Finding]:
    """Which torch this is, and for which devices it was built."""
    builds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "XPU": getattr(torch.version, "xpu", None)}
    built_for = [f"{name} {version}" for name, version in builds.items() if version]
    yield Finding("torch", "ok", f"{torch.__version__}, built for {', '.join(built_for) or 'the CPU alone'}")


def collectives() -> Iterator[Finding]:
    """The libraries that carry tensors between ranks."""
    if not (dist.is_available() and dist.is_gloo_available()):
        advice = "one process trains; for several, install a torch from pytorch.org"
        yield Finding("collectives", "warning", "this torch has no Gloo, which ranks talk through", advice)
        return
    found = ["Gloo"]
    if dist.is_nccl_available():
        found.append(f"NCCL {nccl_version()}")
    found += ["XCCL"] * dist.is_xccl_available()
    yield Finding("collectives", "ok", ", ".join(found))


def devices() -> Iterator[Finding]:
    """Accelerators that torch can use, and drivers that it cannot."""
    for device in accelerators():
        yield Finding("device", "ok", device_words(device))
    if NVIDIA_DRIVER.exists() and not Cuda.is_available():
        yield _unused_nvidia()
    elif not accelerators():
        yield Finding("device", "ok", "cpu; no accelerator found")


def _unused_nvidia() -> Finding:
    if torch.version.cuda is None:
        text = "there is an NVIDIA driver, but this torch is built without CUDA"
        return Finding("device", "warning", text, "install a CUDA build of torch (see pytorch.org, Get Started)")
    text = f"there is an NVIDIA driver, but torch, built for CUDA {torch.version.cuda}, finds no usable GPU"
    advice = "check nvidia-smi, CUDA_VISIBLE_DEVICES and whether the driver is new enough for this CUDA"
    return Finding("device", "problem", text, advice)


def accelerators() -> list[torch.device]:
    """Every device that torch can use besides the CPU."""
    return [found.device for found in every()]


def device_words(device: torch.device) -> str:
    """A device with its name and memory."""
    found = of(device)
    return f"{device} ({found.name}, {in_gib(found.total_memory)})" if found.name else found.kind


def training_step() -> Iterator[Finding]:
    """A small real step, forward and backward, on each device."""
    yield from map(step_on, (torch.device("cpu"), *accelerators()))


def step_on(device: torch.device) -> Finding:
    """A small real step on one device."""
    try:
        _step(device)  # the first one loads libraries
        start = time.perf_counter()
        _step(device)
        taken = Amount(1e3 * (time.perf_counter() - start), "ms")
    except Exception as error:
        text = f"{device}: {type(error).__name__}: {error}"
        return Finding("training step", "problem", text.partition("\n")[0], "this torch does not fit this device")
    return Finding("training step", "ok", f"{device}: {STEP_SIZE} rows of {STEP_SIZE}", amounts=(taken,))


def _step(device: torch.device) -> None:
    """The sum is read back, so that the time is that of the work and not of handing it over."""
    weights = torch.ones(STEP_SIZE, STEP_SIZE, device=device, requires_grad=True)
    torch.matmul(torch.ones(STEP_SIZE, STEP_SIZE, device=device), weights).square().mean().backward()
    assert weights.grad is not None
    gradient = float(weights.grad.sum())
    expected = 2.0 * STEP_SIZE**2
    if abs(gradient - expected) > 1e-2 * expected:
        raise ArithmeticError(f"the gradients add up to {gradient}, expected {expected}")


def cores() -> Iterator[Finding]:
    """Cores that may be used, against threads that torch will start."""
    usable, threads = usable_cores(), torch.get_num_threads()
    words = f"{usable:g} of {os.cpu_count()} cores, {threads} thread{'s' * (threads != 1)} of torch"
    setting = os.environ.get("OMP_NUM_THREADS")
    words += f" (OMP_NUM_THREADS={setting})" if setting else ""
    if threads > usable:
        advice = f"export OMP_NUM_THREADS={max(1, int(usable))}: more threads than cores wait for each other"
        yield Finding("cpu", "warning", words, advice)
    else:
        yield Finding("cpu", "ok", words)


def memory() -> Iterator[Finding]:
    """Memory that may be used before the system ends the process."""
    usable, total = usable_memory(), total_memory()
    limit = f", limited to {in_gib(usable)} by a control group" if usable < total else ""
    is_enough = usable >= ENOUGH_MEMORY
    advice = "" if is_enough else "ask for more memory (--mem of a Slurm job, --memory of a container)"
    yield Finding("memory", "ok" if is_enough else "warning", in_gib(total) + limit, advice)


def tensorboard() -> Iterator[Finding]:
    """Whether curves can be written."""
    try:
        importlib.import_module("torch.utils.tensorboard")
    except Exception as error:
        text = f"cannot be imported: {type(error).__name__}: {error}"
        yield Finding("tensorboard", "problem", text, "pip install tensorboard, or train with observe.tensorboard=0")
    else:
        yield Finding("tensorboard", "ok", importlib.metadata.version("tensorboard"))


def compiler() -> Iterator[Finding]:
    """What torch.compile needs on a CPU: a C++ compiler and Python's headers."""
    candidates = (os.environ.get("CXX"), "c++", "g++", "clang++")
    found = next((path for name in candidates if name and (path := shutil.which(name))), None)
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    if found and has_headers:
        yield Finding("compiler", "ok", found)
        return
    text = "no C++ compiler" if not found else f"{found}, but Python's headers (Python.h) are missing"
    advice = "load or install " + ("one such as g++" if not found else "python3-dev")
    yield Finding("compiler", "warning", text, f"{advice}; without it, train.program=compiled does not work")


def extras() -> Iterator[Finding]:
    """Which groups of optional packages are complete."""
    try:
        requirements = importlib.metadata.requires("isoscale") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "extras", "warning", "isoscale is used, but not installed", "pip install it: its extras are not known"
        )
        return
    groups: dict[str, list[bool]] = {}
    for requirement in requirements:
        extra = re.search(r"extra == ['\"]([^'\"]+)", requirement)
        name = re.match(r"[\w.-]+", requirement)
        if extra and name:
            groups.setdefault(extra[1], []).append(_is_installed(name[0]))
    complete = [name for name, installed in groups.items() if all(installed)]
    others = [name for name in groups if name not in complete]
    text = f"installed: {', '.join(complete) or 'none'}" + (f"; not: {', '.join(others)}" if others else "")
    yield Finding("extras", "ok", text)


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


ANSWER = 10.0
"""Seconds for a command to answer."""
_MPIS = (
    ("Open MPI", re.compile(r"\(Open MPI\) (\S+)|OpenRTE\) (\S+)|prterun.*?(\d\S+)")),
    ("Intel MPI", re.compile(r"Intel\(R\) MPI Library.*?Version (.+?) Build")),
    ("MPICH", re.compile(r"HYDRA build details:\s+Version:\s+(\S+)")),
)
"""Kinds of MPI, each with where its version stands in what `mpirun --version` says."""


def mpi() -> Iterator[Finding]:
    """Which mpirun the shell finds; isoscale needs none, but can be started by one."""
    program = shutil.which("mpirun") or shutil.which("mpiexec")
    if program is None:
        yield Finding("mpi", "ok", "no mpirun on this machine")
        return
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=ANSWER, stdin=subprocess.DEVNULL
        )
        said = done.stdout + done.stderr
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    found = next(((name, match) for name, pattern in _MPIS if (match := pattern.search(said))), None)
    if found is None:
        text = f"{program}, which does not tell its version"
        yield Finding("mpi", "warning", text, f"try {program} --version: it may not fit this machine")
    else:
        yield Finding("mpi", "ok", f"{found[0]} {next(filter(None, found[1].groups()))}, {program}")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    python_version,
    torch_build,
    collectives,
    devices,
    training_step,
    cores,
    memory,
    tensorboard,
    compiler,
    extras,
    mpi,
)
"""The questions, in the order in which they are answered."""
