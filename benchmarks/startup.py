"""How long a training takes to its first step, and where that goes, beside a minimal script of torch.distributed.

    python benchmarks/startup.py [--ranks 1,2,4] [--trials 3] [--launchers devices,torchrun,mpirun,srun] [--out FILE.md]
                                 [--before SOURCE]

Both sides are started the same way and take turns; each trial starts new processes. `isoscale` is `isoscale train
images/digits` up to the end of its first step; `minimal` imports torch, opens a process group over Gloo, adds a tensor
over the ranks and takes one step of AdamW on the same network. The clock begins when the launcher is called. Phases are
means over the ranks, medians over the trials; a rank that waits for another one spends that time in the phase where it
waits. `srun` needs what the tests in tests/cluster need: root, and Debian's slurm-wlm and munge. With `--before`, the
`src` folder of an earlier isoscale takes part as a third side.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

TOP = time.time()
ROOT = Path(__file__).resolve().parents[1]
SIDES = ("isoscale", "minimal", "before")
PHASES = ("launcher", "python", "import torch", "import isoscale", "rendezvous", "process group", "recipe",
          "run directory", "task and data", "assembly", "first step")  # fmt: skip
CPU = "CPU"
"""Seconds that a rank computed, which a busy machine hardly changes."""
ROW = dict[str, float]


class Phases:
    """Seconds by phase; the time that no phase claims goes to the one that comes next."""

    def __init__(self) -> None:
        self.seconds: ROW = {}
        self.last = float(os.environ["STARTUP_BEGAN"])

    def done(self, name: str, when: float | None = None) -> None:
        now = time.time() if when is None else when
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self.last
        self.last = now

    def watch(self, owner: Any, function: str, name: str, before: str | None = None) -> None:
        """From now on, whenever a function returns, what has passed was this phase, and another one before it."""
        original = getattr(owner, function)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                self.done(before)
            found = original(*args, **kwargs)
            self.done(name)
            return found

        setattr(owner, function, timed)

    def write(self) -> None:
        folder = Path(os.environ["STARTUP_OUT"])
        found = {**self.seconds, CPU: time.process_time()}
        (folder / f"{os.uname().nodename}-{os.getpid()}.json").write_text(json.dumps(found))


def began() -> float:
    """When the system started this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def be_rank(side: str) -> None:
    phases = Phases()
    phases.done("launcher", began())
    phases.done("python", TOP)
    import torch

    phases.done("import torch")
    torch.set_num_threads(1)
    minimal_rank(phases) if side == "minimal" else isoscale_rank(phases)
    leave(phases)


def leave(phases: Phases) -> NoReturn:
    """End at once: how ranks take leave of each other is not measured."""
    phases.write()
    sys.stdout.flush()
    os._exit(0)


def isoscale_rank(phases: Phases) -> None:
    import torch.distributed as dist

    from isoscale.engine.step.programs import EagerProgram
    from isoscale.parallel import world
    from isoscale.runs import open as opening
    from isoscale.runs import session

    phases.done("import isoscale")
    phases.watch(world.Rendezvous, "meet", "rendezvous")
    phases.watch(world, "_open_group", "process group")
    phases.watch(session.Session, "_build", "task and data", "run directory")
    phases.watch(session.Engine, "prepare", "assembly")
    original = EagerProgram.run

    def first_step(self: Any, start: int, stop: int, interrupted: Callable[[], bool]) -> int:
        original(self, start, start + 1, interrupted)
        phases.done("first step")
        if dist.is_initialized():
            dist.barrier()
        leave(phases)

    EagerProgram.run = first_step
    keys = {"observe.level": "error", "train.threads": 1, "train.device": "cpu", "train.program": "eager"}
    opened = opening.open_session("images/digits", keys, os.environ["STARTUP_RUN"])
    phases.done("recipe")
    opened.train()


def minimal_rank(phases: Phases) -> None:
    import torch
    import torch.distributed as dist

    rank, world = numbers()
    if world > 1:
        os.environ.setdefault("MASTER_ADDR", os.environ["STARTUP_ADDRESS"])
        os.environ.setdefault("MASTER_PORT", os.environ["STARTUP_PORT"])
        dist.init_process_group("gloo", rank=rank, world_size=world)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == world
    phases.done("process group")
    widths = [64, 256, 256, 10]
    layers = [torch.nn.Linear(*pair) for pair in pairwise(widths)]
    network = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2])
    optimizer = torch.optim.AdamW(network.parameters())
    phases.done("assembly")
    loss = torch.nn.functional.cross_entropy(network(torch.randn(64 // world, 64)), torch.zeros(64 // world).long())
    loss.backward()
    if world > 1:
        gradients = torch.cat([parameter.grad.flatten() for parameter in network.parameters()])
        dist.all_reduce(gradients)
    optimizer.step()
    phases.done("first step")
    if world > 1:
        dist.barrier()


def numbers() -> tuple[int, int]:
    """Rank and world, as each launcher says them."""
    for rank, world in (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
                        ("SLURM_PROCID", "SLURM_NTASKS")):  # fmt: skip
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ[world])
    return 0, 1


Start = Callable[[int, list[str], dict[str, str]], subprocess.CompletedProcess[str]]
"""Starts so many ranks of a program (its words, variables besides those of this process)."""


def start_here(words: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "OMPI_", "PMI"))}
    return subprocess.run(words, env={**kept, **variables}, capture_output=True, text=True, timeout=180)


def devices(ranks: int, words: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return start_here([sys.executable, __file__, "--launch", str(ranks), *words[2:]], variables)


def torchrun(ranks: int, words: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).with_name("torchrun"))
    return start_here([program, "--standalone", f"--nproc-per-node={ranks}", *words[1:]], variables)


def mpirun(ranks: int, words: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    program = shutil.which("mpirun.openmpi") or shutil.which("mpirun")
    return start_here([str(program), "--allow-run-as-root", "--oversubscribe", "-np", str(ranks), *words], variables)


@contextmanager
def launchers(names: list[str]) -> Iterator[dict[str, Start]]:
    """The launchers that are asked for; a Slurm of two nodes is started for `srun`, and ended."""
    found: dict[str, Start] = {"devices": devices, "torchrun": torchrun, "mpirun": mpirun}
    wanted = {name: found[name] for name in names if name != "srun"}
    if "srun" not in names:
        yield wanted
        return
    sys.path.insert(0, str(ROOT))
    from tests.cluster.slurm import Cluster

    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder))

        def srun(ranks: int, words: list[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
            place = [f"--nodes={min(2, ranks)}", f"--ntasks={ranks}", f"--nodelist={'n1,n2' if ranks > 1 else 'n1'}"]
            own = {**variables, "STARTUP_ADDRESS": "10.77.0.1"}
            if "minimal" in words:
                own["GLOO_SOCKET_IFNAME"] = "eth0"  # which isoscale finds out by itself
            return cluster.run("srun", *place, *words, environment=own, check=False)

        try:
            cluster.start()
            yield {**wanted, "srun": srun}
        finally:
            cluster.stop()


def trial(start: Start, ranks: int, side: str, before: Path | None) -> tuple[float, ROW]:
    """Seconds from the call of the launcher to the end of the first step on the last rank, and the mean phases."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "STARTUP_OUT": folder, "STARTUP_RUN": f"{folder}/run", "STARTUP_ADDRESS": "127.0.0.1",
            "STARTUP_PORT": "29417", "OMP_NUM_THREADS": "1", "STARTUP_BEGAN": repr(time.time()),
        }  # fmt: skip
        if side == "before":
            variables["PYTHONPATH"] = str(before)
        done = start(ranks, [sys.executable, __file__, "--as-rank", side], variables)
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
        if len(found) != ranks:
            raise SystemExit(f"{side} on {ranks} ranks: {len(found)} came to the end\n{done.stdout}\n{done.stderr}")
    totals = [sum(each.get(phase, 0.0) for phase in PHASES) for each in found]
    return max(totals), {name: statistics.mean(each.get(name, 0.0) for each in found) for name in (CPU, *PHASES)}


def table(name: str, start: Start, counts: list[int], trials: int, before: Path | None) -> list[str]:
    lines = []
    sides = [side for side in SIDES if side != "before" or before]
    for ranks in counts:
        found: dict[str, list[tuple[float, ROW]]] = {side: [] for side in sides}
        for _ in range(trials):
            for side in sides:
                found[side].append(trial(start, ranks, side, before))
                print(f"{name}, {ranks} ranks, {side}: {found[side][-1][0]:.2f} s", file=sys.stderr, flush=True)
        lines += [row(name, ranks, side, found[side]) for side in sides]
    return lines


def row(name: str, ranks: int, side: str, found: list[tuple[float, ROW]]) -> str:
    totals = [total for total, _ in found]
    phases = [statistics.median(seconds[phase] for _, seconds in found) for phase in (CPU, *PHASES)]
    cells = [f"{seconds:.2f}" if seconds >= 0.005 else "" for seconds in phases]
    spread = f"{min(totals):.2f}–{max(totals):.2f}"
    return f"| {name} | {ranks} | {side} | **{statistics.median(totals):.2f}** | {spread} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--launchers", default="devices,torchrun,mpirun,srun")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--before", type=Path, metavar="SOURCE", help="the src folder of an earlier isoscale")
    parser.add_argument("--as-rank", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--launch", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch is not None:
        from isoscale.launch.local import launch

        raise SystemExit(launch(options.launch, [__file__, "--as-rank", options.as_rank]))
    if options.as_rank is not None:
        be_rank(options.as_rank)
    with launchers(options.launchers.split(",")) as found:
        counts = [int(count) for count in options.ranks.split(",")]
        lines = [
            line
            for name, start in found.items()
            for line in table(name, start, counts, options.trials, options.before and options.before.resolve())
        ]
    out = options.out or Path(__file__).parent / "results" / f"{time.strftime('%Y-%m-%d')}-startup.md"
    text = "\n".join([heading(options.trials, options.before is not None), *lines, ""])
    out.write_text(text)
    print(text)


def heading(trials: int, is_before_shown: bool) -> str:
    import torch

    import isoscale
    from isoscale.runs.directory import hardware

    load = os.getloadavg()[1]
    return "\n".join([
        f"# How long a training takes to its first step, {time.strftime('%Y-%m-%d')}",
        "",
        f"{hardware()['processor']}, {os.cpu_count()} cores, one thread a rank; Python {platform.python_version()}, "
        f"torch {torch.__version__}, isoscale {isoscale.__version__}; median of {trials} trials, in which the sides "
        f"take turns; load of the machine over the last 5 minutes: {load:.1f}. `devices` is `isoscale train "
        "--devices`, `srun` is "
        "Slurm on two virtual nodes of this machine, with an allocation of its own for every trial. `minimal` imports "
        "torch, opens a process group over Gloo, adds a tensor over the ranks and takes one step of AdamW on the same "
        "network. Seconds; the total is that of the last rank, with its range; what a rank computed (CPU) and phases "
        "are means over the ranks. For the first optimizer of a process torch imports its compiler (`torch._dynamo`), "
        "which is most of the `assembly` of `minimal`; isoscale puts that off until something is compiled."
        + (" `before` is isoscale before it did." if is_before_shown else ""),
        "",
        f"| launcher | ranks | side | total | min–max | {' | '.join((CPU, *PHASES))} |",
        f"|{'---|' * (6 + len(PHASES))}",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
