"""What batch systems tell the processes that they start, and all processes of a job: Slurm, PALS on PBS, LSF."""

import re
from collections.abc import Iterator
from itertools import groupby, product
from pathlib import Path

from isoscale.errors import UserError
from isoscale.parallel.environments.base import (
    FIRST_PORT,
    NUM_PORTS,
    Environment,
    Numbering,
    Place,
    Variables,
    number,
)
from isoscale.parallel.environments.batch import SYSTEMS

_ENTRY = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
"""A host or several of them: no comma outside of brackets."""
_PART = re.compile(r"\[([^\]]*)\]|([^\[]+)")
STEPS_APART = 61
"""How far the ports of two jobs that follow each other are apart: steps of one job lie in between."""


def expand(text: str) -> list[str]:
    """Every host of a list as Slurm writes it, in its order: `n[1-4,7],gpu-[001-003]`."""
    hosts = [host for entry in _ENTRY.findall(text) for host in _hosts(entry, text)]
    if not hosts or _ENTRY.sub("", text).strip(","):
        raise _unreadable(text)
    return hosts


def expand_counts(text: str) -> list[int]:
    """Tasks on each host, as in `2(x3),1`."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?(?:,|$)", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _hosts(entry: str, text: str) -> list[str]:
    parts = [[found[2]] if found[2] else list(_numbers(found[1], text)) for found in _PART.finditer(entry)]
    return ["".join(combined) for combined in product(*parts)]


def _numbers(ranges: str, text: str) -> Iterator[str]:
    """What a bracket holds; numbers are as wide as the first of their range."""
    for each in ranges.split(","):
        first, dash, last = each.partition("-")
        last = last if dash else first
        if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
            raise _unreadable(text)
        yield from (f"{value:0{len(first)}d}" for value in range(int(first), int(last) + 1))


def _unreadable(text: str) -> UserError:
    return UserError(
        f"the list of hosts is {text!r}, but should look like n[1-4,7],login: export MASTER_ADDR, the host of rank 0"
    )


class Slurm(Numbering):
    """A step of a job: what srun starts."""

    name = "srun"
    rank = "SLURM_PROCID"
    world = "SLURM_NTASKS"
    local_rank = "SLURM_LOCALID"

    def is_here(self, variables: Variables) -> bool:
        """Whether this is a task of a step; the script of a job is none, though it has a number too."""
        return self.rank in variables and "SLURM_STEP_ID" in variables

    def read(self, variables: Variables) -> Environment:
        """The numbers of the step, which in an interactive shell are not those of the job."""
        tasks = variables.get("SLURM_STEP_NUM_TASKS") or variables.get("SLURM_NTASKS") or "1"
        return super().read({**variables, "SLURM_NTASKS": tasks})

    def on_host(self, variables: Variables) -> tuple[int | None, int | None]:
        """Number of this task on its node, and how many there are."""
        local_rank = number(variables, self.local_rank, 0) if self.local_rank in variables else None
        counts, node = _tasks_per_node(variables), variables.get("SLURM_NODEID", "")
        return local_rank, counts[int(node)] if node.isdigit() and int(node) < len(counts) else None

    def job(self, variables: Variables, on_one_host: bool) -> str:
        """Job and step."""
        return f"{variables.get('SLURM_JOB_ID', '')}.{variables['SLURM_STEP_ID']}"

    def attempt(self, variables: Variables) -> str:
        """How often the job was put back into the queue."""
        return variables.get("SLURM_RESTART_COUNT", "0")

    def port(self, variables: Variables, job: str) -> int:
        """One for each step of each job: neighbours never share one."""
        job_id, step = (int(part) if part.isdigit() else 0 for part in job.split("."))
        return FIRST_PORT + (job_id * STEPS_APART + step) % NUM_PORTS

    def first_host(self, variables: Variables) -> Place | None:
        """The first host of the step."""
        names = (name for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if variables.get(name))
        name = next(names, None)
        return Place(expand(variables[name])[0], f"{name}={variables[name]}") if name else None

    def hosts(self, variables: Variables, rank: int, world: int) -> tuple[str, ...]:
        """The host of every task, where each host was filled before the next one."""
        nodes = variables.get("SLURM_STEP_NODELIST")
        in_blocks = variables.get("SLURM_DISTRIBUTION", "block").startswith("block")
        if not nodes or not in_blocks:
            return ()
        listed, counts = expand(nodes), _tasks_per_node(variables)
        found = tuple(host for host, count in zip(listed, counts, strict=False) for _ in range(count))
        node = variables.get("SLURM_NODEID", "")
        is_true = len(found) == world and node.isdigit() and found[rank] == listed[int(node)]
        return found if is_true else ()


class Pals(Numbering):
    """Cray's launcher on systems with PBS, where `mpiexec` starts processes."""

    name = "PALS (mpiexec)"
    rank = "PALS_RANKID"
    world = "PMI_SIZE"
    local_rank = "PALS_LOCAL_RANKID"
    local_world = "PALS_LOCAL_SIZE"
    advice = "in the job script: export MASTER_ADDR=$(head -n 1 $PBS_NODEFILE)"

    def read(self, variables: Variables) -> Environment:
        """The numbers; some systems leave out how many processes there are, and the user has to say it."""
        world = variables.get("PMI_SIZE") or variables.get("WORLD_SIZE")
        if not world:
            raise UserError(
                "PALS_RANKID is set, but PMI_SIZE is not: export WORLD_SIZE, the number of ranks, before mpiexec"
            )
        return super().read({**variables, "PMI_SIZE": world})

    def job(self, variables: Variables, on_one_host: bool) -> str:
        """The number of this start, or of the job."""
        return variables.get("PALS_APID") or job_id(variables)

    def first_host(self, variables: Variables) -> Place | None:
        """The first host of the job."""
        return first_of_job(variables)


class Lsf(Numbering):
    """jsrun, on systems with LSF."""

    name = "jsrun"
    rank = "JSM_NAMESPACE_RANK"
    world = "JSM_NAMESPACE_SIZE"
    local_rank = "JSM_NAMESPACE_LOCAL_RANK"
    local_world = "JSM_NAMESPACE_LOCAL_SIZE"

    def job(self, variables: Variables, on_one_host: bool) -> str:
        """The job, and this start within it."""
        return f"{job_id(variables)} {variables.get('PMIX_NAMESPACE', '')}".strip()

    def first_host(self, variables: Variables) -> Place | None:
        """The first host that computes: the script of the job may have one of its own, with one slot."""
        slots = [(host, len(list(same))) for host, same in groupby(_lsf_slots(variables))]
        has_own = len(slots) > 1 and slots[0][1] == 1 and slots[1][1] > 1
        return Place(slots[has_own][0], "the hosts of the LSF job") if slots else None


def job_id(variables: Variables) -> str:
    """The number of the batch job, if there is one."""
    return next((variables[system.job] for system in SYSTEMS if variables.get(system.job)), "")


def first_of_job(variables: Variables) -> Place | None:
    """The first host of the batch job, which is where most launchers inside it put rank 0."""
    if variables.get("SLURM_JOB_NODELIST"):
        return Place(expand(variables["SLURM_JOB_NODELIST"])[0], "the hosts of the Slurm job")
    slots = _lsf_slots(variables)
    if slots:
        return Place(slots[0], "the hosts of the LSF job")
    lines = _lines(variables.get("PBS_NODEFILE", ""))
    return Place(lines[0], "the hosts of the PBS job") if lines else None


def started_without(variables: Variables) -> str:
    """What to say to a process that is alone in a Slurm job of several tasks; nothing where that is as it should be."""
    tasks = variables.get("SLURM_NTASKS", "")
    if "SLURM_STEP_ID" in variables or not tasks.isdigit() or int(tasks) < 2:
        return ""
    return (
        f"Slurm job {job_id(variables)} has {tasks} tasks, but this process was started without srun and trains alone; "
        "to train on all of them: srun isoscale train …"
    )


def _tasks_per_node(variables: Variables) -> list[int]:
    return expand_counts(variables.get("SLURM_STEP_TASKS_PER_NODE") or variables.get("SLURM_TASKS_PER_NODE") or "")


def _lsf_slots(variables: Variables) -> list[str]:
    """The host of every slot of the job."""
    lines = _lines(variables.get("LSB_DJOB_RANKFILE", ""))
    counted = re.findall(r"(\S+)\s+(\d+)", variables.get("LSB_MCPU_HOSTS", ""))
    hosts = [host for host, count in counted for _ in range(int(count))]
    return lines or hosts or variables.get("LSB_HOSTS", "").split()


def _lines(path: str) -> list[str]:
    """The lines of a file, none where it cannot be read: some lie only on the first host of a job."""
    try:
        return Path(path).read_text().split() if path else []
    except OSError:
        return []
