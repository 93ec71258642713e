"""A real Slurm on this machine: a login node and three compute nodes, each with namespaces of its own.

A node has its own network address, host name, process numbers and /etc/hosts, so that nothing outside is disturbed, and
a node that is switched off takes all its processes with it. Needs root and Debian's slurm-wlm and munge.
"""

import os
import secrets
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "nsenter", "setpriv", "unshare", "ip")
LOGIN = "login"
NODES = ("n1", "n2", "n3")
ADDRESSES = {LOGIN: "10.77.0.254", **{name: f"10.77.0.{number}" for number, name in enumerate(NODES, start=1)}}
FIRST_PROCESS = (
    "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print(flush=True)\nwhile True: signal.pause()"
)
"""Stays for as long as its node, and lets no dead process linger there."""

CONFIGURATION = """
ClusterName=test
SlurmctldHost={login}({address})
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=50000,sched_interval=1,bf_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
SlurmdTimeout=5
MessageTimeout=5
KillWait=10
ReturnToService=2
GresTypes=gpu
AccountingStorageType=accounting_storage/none
NodeName=n[1-3] NodeAddr=10.77.0.[1-3] CPUs=4 RealMemory=8000 Gres=gpu:2 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=batch Nodes=ALL Default=YES MaxTime=60 DefaultTime=5 State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=60 DefaultTime=5 State=UP PriorityTier=10 PreemptMode=OFF
"""


class Node:
    """A machine: the processes inside a set of namespaces."""

    def __init__(self, name: str, hosts: Path) -> None:
        self.name = name
        # ends with this process, however that ends
        words = ["setpriv", "--pdeathsig=KILL", "unshare", "--net", "--uts", "--mount", "--pid", "--fork"]
        words += ["--kill-child", "--mount-proc"]
        self._outer = subprocess.Popen([*words, sys.executable, "-c", FIRST_PROCESS], stdout=subprocess.PIPE)
        assert self._outer.stdout is not None
        self._outer.stdout.readline()
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text()
        self.process = int(children.split()[0])
        self.call("hostname", name)
        self.call("mount", "--bind", str(hosts), "/etc/hosts")
        self.call("ip", "link", "set", "lo", "up")

    def inside(self, *words: str) -> list[str]:
        """A command line that runs on the node."""
        here = ["nsenter", f"--target={self.process}", "--net", "--uts", "--mount", "--pid"]
        return [*here, f"--wd={os.getcwd()}", *words]

    def call(self, *words: str) -> None:
        subprocess.run(self.inside(*words), check=True, capture_output=True, text=True)

    def switch_off(self) -> None:
        """End the node: the kernel kills whatever runs in it."""
        self._outer.kill()
        self._outer.wait()


class Cluster:
    """Slurm, and what tests do with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[str, Node] = {}
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Switch everything on, and wait until all nodes are idle."""
        self._write_files()
        self._switch_on(LOGIN)
        self._connect()
        munge = self.folder / "munge"
        self._serve(LOGIN, "munged", "--foreground", "--force", f"--key-file={munge}/key", f"--socket={munge}/socket",
                    f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed")  # fmt: skip
        wait_for(lambda: (munge / "socket").exists(), "munged", 10)
        self._serve(LOGIN, "slurmctld", "-D")
        wait_for(lambda: " UP" in self.run("scontrol", "ping", check=False).stdout, "slurmctld", 20)
        for name in NODES:
            self.switch_on(name)
        self.wait_until_idle()

    def _write_files(self) -> None:
        (self.folder / "munge").mkdir(mode=0o755)
        (self.folder / "state").mkdir()
        (self.folder / "munge/key").write_bytes(secrets.token_bytes(1024))
        (self.folder / "munge/key").chmod(0o600)
        text = CONFIGURATION.format(folder=self.folder, login=LOGIN, address=ADDRESSES[LOGIN])
        (self.folder / "slurm.conf").write_text(text)
        for number in (0, 1):  # Slurm counts only what is a device
            os.mknod(self.folder / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-1]\n")
        lines = [f"{address} {name}" for name, address in ADDRESSES.items()]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def _switch_on(self, name: str) -> Node:
        self.nodes[name] = Node(name, self.folder / "hosts")
        return self.nodes[name]

    def _connect(self) -> None:
        """The login node is also the switch that all cables end in."""
        login = self.nodes[LOGIN]
        login.call("ip", "link", "add", "switch", "type", "bridge")
        login.call("ip", "address", "add", f"{ADDRESSES[LOGIN]}/24", "dev", "switch")
        login.call("ip", "link", "set", "switch", "up")

    def switch_on(self, name: str) -> None:
        """Switch a compute node on and let its slurmd report to the controller."""
        node, login = self._switch_on(name), self.nodes[LOGIN]
        cable = ["ip", "link", "add", f"to-{name}", "netns", str(login.process), "type", "veth", "peer", "name", "eth0"]
        subprocess.run([*cable, "netns", str(node.process)], check=True)
        login.call("ip", "link", "set", f"to-{name}", "master", "switch", "up")
        node.call("ip", "address", "add", f"{ADDRESSES[name]}/24", "dev", "eth0")
        node.call("ip", "link", "set", "eth0", "up")
        self._serve(name, "slurmd", "-D")

    def _serve(self, node: str, *words: str) -> None:
        log = (self.folder / f"{words[0]}.{node}.out").open("ab")
        environment = {**os.environ, **self.environment}
        subprocess.Popen(
            self.nodes[node].inside(*words), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )

    def stop(self) -> None:
        """Switch everything off: nothing survives the first process of its node."""
        for node in self.nodes.values():
            node.switch_off()

    def run(
        self, *words: str, cwd: Path | None = None, check: bool = True, timeout: float = 120,
        environment: Mapping[str, str] = {},
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """Run a command on the login node."""
        prefix = [*self.nodes[LOGIN].inside()[:-1], f"--wd={cwd or os.getcwd()}"]
        done = subprocess.run(
            [*prefix, *words], env={**os.environ, **self.environment, **environment}, capture_output=True, text=True,
            timeout=timeout,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
        return done

    def idle_nodes(self) -> set[str]:
        return set(self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", check=False).stdout.split())

    def wait_until_idle(self, seconds: float = 60) -> None:
        wait_for(lambda: self.idle_nodes() == set(NODES), "idle nodes", seconds)

    def state(self, job: str) -> str:
        """What the controller says about a job: PENDING, RUNNING, COMPLETED …"""
        return self.facts(job).get("JobState", "")

    def facts(self, job: str) -> dict[str, str]:
        shown = self.run("scontrol", "show", "job", "--oneliner", job, check=False).stdout
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    @staticmethod
    def wait_for(condition: Callable[[], object], what: str, seconds: float = 90) -> None:
        """Look again and again until something is so."""
        wait_for(condition, what, seconds)

    def wait(self, job: str, *states: str, seconds: float = 120) -> str:
        """Wait until a job has ended, or is in one of the given states."""
        ends = states or ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        wait_for(lambda: self.state(job) in ends, f"job {job} in {ends}", seconds)
        return self.state(job)

    def clear(self) -> None:
        """Cancel all jobs and switch on what was switched off, for the next test."""
        self.run("scancel", "--user=root", check=False)
        self.run("scancel", "--user=root", "--signal=KILL", "--full", check=False)
        for name in NODES:
            if self.nodes[name]._outer.poll() is not None:
                self.switch_on(name)
        wait_for(lambda: self.run("squeue", "-h").stdout == "", "the end of all jobs", 60)
        self.wait_until_idle()


def wait_for(condition: Callable[[], object], what: str, seconds: float) -> None:
    """Look again and again until something is so."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:g} s for {what}"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def switched_on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster, once for all tests of a process."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs a real Slurm (Debian: slurm-wlm, munge), and there is no {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("needs root, to give virtual nodes their own networks")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        try:
            cluster.start()
        except (AssertionError, subprocess.CalledProcessError) as error:
            logs = "".join(path.read_text(errors="replace")[-2000:] for path in cluster.folder.glob("*.log"))
            pytest.fail(f"Slurm does not start: {error}\n{logs}")
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def slurm(switched_on: Cluster) -> Iterator[Cluster]:
    """An empty cluster; what a test leaves is cleared away."""
    yield switched_on
    switched_on.clear()
