"""What a rank is, in plain facts that it tells the others: where it runs, on what, and with which versions."""

import hashlib
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from isoscale._version import __version__
from isoscale.parallel import pinning
from isoscale.system import devices
from isoscale.system.process import birth

PACKAGE = Path(__file__).parents[1]
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Variables that hide devices from a process."""
FILES = "isoscale's files"


@dataclass(frozen=True)
class Facts:
    """One rank."""

    rank: int
    host: str
    process: int
    device: str = "cpu"
    device_name: str = ""
    visible: str = ""
    """The variables that hide devices from it, as they are set."""
    node: int | None = None
    """The NUMA node of its device, where that is known."""
    cores: tuple[int, ...] = ()
    """Those that it may use; empty where the system does not say."""
    versions: dict[str, str] = field(default_factory=dict)
    born: str = ""
    """What tells its process from another one of the same number."""

    @classmethod
    def read(cls, values: dict[str, Any]) -> "Facts":
        """As another rank told them."""
        return cls(**{**values, "cores": tuple(values["cores"])})


def of_this_rank(rank: int, host: str, device_kind: str) -> Facts:
    """The facts about this process, whose device is chosen already."""
    about = _of_device(device_kind)
    visible = ", ".join(f"{name}={os.environ[name]}" for name in VISIBLE if name in os.environ)
    return Facts(
        rank, host, os.getpid(), visible=visible, cores=pinning.own_cores(), versions=versions(),
        born=birth(os.getpid()), **about,
    )  # fmt: skip


def _of_device(kind: str) -> dict[str, Any]:
    if not issubclass(devices.KINDS[kind], devices.Numbered):
        return {"device": kind}
    mine = devices.find(kind)
    assert isinstance(mine, devices.Numbered)
    found, node = mine.properties, None
    if hasattr(found, "pci_bus_id"):
        domain = getattr(found, "pci_domain_id", 0)
        node = pinning.node_of_device(f"{domain:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0")
    return {"device": str(mine.device), "device_name": str(found.name), "node": node}


def versions() -> dict[str, str]:
    """What has to be the same on all ranks, by name."""
    found = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        found.update(f"{file.relative_to(PACKAGE)}\0".encode() + file.read_bytes())
    return {
        "isoscale": __version__, "torch": torch.__version__, "Python": platform.python_version(),
        FILES: found.hexdigest()[:12],
    }  # fmt: skip
