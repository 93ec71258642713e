"""Two machines on this one: namespaces with their own network address, host name and /etc/hosts.

A cable joins them, and nothing outside is changed. A small script stands in for ssh between them. Needs root.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

PROGRAMS = ("ip", "nsenter", "unshare", "mount")
ADDRESSES = {"first": "10.79.0.1", "second": "10.79.0.2"}
FIRST_PROCESS = "import signal; print(flush=True); signal.pause()"
"""Stays for as long as its machine."""
NAMESPACES = ("--net", "--uts", "--mount")

AGENT = """#!/bin/sh
# As ssh is called: options, a host, and a command as the shell of that host would read it.
while :; do case "$1" in -[olpi]) shift 2 ;; -*) shift ;; *) break ;; esac; done
case "$1" in {cases} *) echo "no host $1" >&2; exit 255 ;; esac
shift
exec nsenter --target "$process" {namespaces} sh -c "$*"
"""


class Host:
    """One machine."""

    def __init__(self, name: str, hosts: Path) -> None:
        """Switch it on; `hosts` is its /etc/hosts."""
        self.name = name
        words = ["unshare", *NAMESPACES, sys.executable, "-c", FIRST_PROCESS]
        self._first = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert self._first.stdout is not None
        self._first.stdout.readline()
        self.process = self._first.pid
        for command in (
            ["hostname", name],
            ["mount", "--bind", str(hosts), "/etc/hosts"],
            ["ip", "link", "set", "lo", "up"],
        ):
            self.call(*command)

    def inside(self, *words: str) -> list[str]:
        """A command line that runs there, in the same folder as here."""
        return ["nsenter", "--target", str(self.process), *NAMESPACES, f"--wd={os.getcwd()}", *words]

    def call(self, *words: str) -> None:
        """Run a short command there."""
        subprocess.run(self.inside(*words), check=True, capture_output=True, text=True)

    def switch_off(self) -> None:
        """End it, with all that runs on it."""
        for process in self._processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self._first.wait()

    def _processes(self) -> list[int]:
        mine = Path(f"/proc/{self.process}/ns/net").readlink()
        numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [number for number in numbers if _network(number) == mine]


def _network(process: int) -> Path | None:
    with suppress(OSError):
        return Path(f"/proc/{process}/ns/net").readlink()
    return None


class Pair:
    """Two machines that reach each other, `first` and `second`, and the script that stands in for ssh."""

    def __init__(self, first: Host, second: Host, agent: Path) -> None:
        """Connect them."""
        self.first, self.second, self.agent = first, second, agent
        cable = ["ip", "link", "add", "eth0", "netns", str(first.process), "type", "veth", "peer", "name", "eth0"]
        subprocess.run([*cable, "netns", str(second.process)], check=True, capture_output=True)
        for host in (first, second):
            host.call("ip", "address", "add", f"{ADDRESSES[host.name]}/24", "dev", "eth0")
            host.call("ip", "link", "set", "eth0", "up")
        cases = " ".join(f"{host.name}) process={host.process} ;;" for host in (first, second))
        agent.write_text(AGENT.format(cases=cases, namespaces=" ".join(NAMESPACES)))
        agent.chmod(0o755)


@contextmanager
def pair(folder: Path) -> Iterator[Pair]:
    """Two machines for as long as they are needed; skips where that is not possible."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"needs {', '.join(missing) or 'root'}, to make namespaces")
    lines = [f"{address} {name}" for name, address in ADDRESSES.items()]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    machines: list[Host] = []
    try:
        machines += [Host(name, folder / "hosts") for name in ADDRESSES]
        yield Pair(machines[0], machines[1], folder / "agent")
    finally:
        for machine in machines:
            machine.switch_off()


def host_file(path: Path, names: Sequence[str], form: str) -> Path:
    """A file that lists hosts with one place for a process each."""
    path.write_text("".join(f"{form.format(name)}\n" for name in names))
    return path
