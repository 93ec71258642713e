"""Broken input of every kind, for as long as one likes: no crash without a message, nothing executed, no hang.

    python tests/nightly/fuzz.py --minutes 60 --seed 1 --log fuzz.txt

Recipes, checkpoints, run.json, data files, the variables of launchers, and bytes to every port of a training on two
ranks are broken at random. Each case is a real command; what it said is kept where it fails, with the files it got.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import isoscale
from tests import warm
from tests.helpers import command, sha

PATIENCE = 90.0
CANARY = "executed"
"""A file that nothing may create: hostile values try to."""
HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, -0.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"),
    "", " ", "~", "é", "\ud800", "\x00", "\x1b[2J", "a\nb", "-", "--help", "../..", "/", "/dev/null", "/dev/zero",
    "/proc/self/mem", "a" * 300, "[" * 2000, "{" * 2000, [], {}, [[]],
    {"class": "os.system", "command": f"touch {CANARY}"}, {"class": "builtins.exec"},
    {"class": "subprocess.run", "args": ["touch", CANARY], "kwargs": {}}, {"class": 5}, {"class": "mlp"},
    {"class": "antigravity.fly"}, {"class": "torch.hub.load"}, {"extends": "images/digits"}, f"$(touch {CANARY})",
    f"`touch {CANARY}`", f"; touch {CANARY};", "1e400", "0x10", "1_000", "09", "1 epoch", "-1 steps", "auto", "none",
    "nan", "{}", "[]", "null", "train", "val/loss", [1, "a", None], {"a": {"b": {"c": []}}}, 3 + 2**52,
]  # fmt: skip
TAGS = [
    f"!!python/object/apply:os.system ['touch {CANARY}']", "&a [*a]", "*b", "<<: *c", "? [1]\n: 2", "%YAML 9.9",
    "\t- x", "'", '"', "{", "[", "|", "!!binary AAAA", "2026-02-30", "0o9", ": :", "- - -",
]  # fmt: skip
VARIABLES = [
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK",
    "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID",
    "SLURM_NNODES", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS",
    "SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_RESTART_COUNT",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK", "PMI_SIZE", "PMIX_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PALS_RANKID", "FLUX_TASK_RANK",
    "JSM_NAMESPACE_RANK", "LSB_JOBID", "PBS_JOBID", "PBS_NODEFILE", "COBALT_JOBID", "JOB_ID", "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS", "NUM_WORKERS", "ISOSCALE_CACHE", "ISOSCALE_SECRET", "ISOSCALE_INTERFACE", "GLOO_SOCKET_IFNAME",
    "COLUMNS", "TERM", "NO_COLOR", "TMPDIR", "HOME", "XDG_CONFIG_HOME", "TZ", "LANG",
]  # fmt: skip
QUIET = ["observe.tensorboard=0", "train.threads=1"]


@dataclass
class Case:
    """A command on broken input, and a command of the shell that shows it again."""

    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    may_run: bool = False
    """Whether it is the user's own recipe that is trained, and may name whatever it likes."""
    may_wait: bool = False
    """Whether waiting for others that never come is right: it is ended then."""


def broken(data: bytes, rng: random.Random) -> bytes:
    """Bytes with something wrong with them."""
    what = rng.randrange(8)
    place = rng.randrange(len(data) + 1)
    if what == 0:
        return data[:place]
    if what == 1:
        return b""
    if what == 2:
        return data[:place] + rng.randbytes(rng.randrange(1, 64)) + data[place:]
    if what == 3:
        end = min(len(data), place + rng.randrange(1, 200))
        return data[:place] + data[end:]
    if what == 4:
        return data + data[:place]
    if what == 5:
        return data[:place] + bytes(len(data) - place)
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 3, 20))):
        if changed:
            # Headers are where the sense is.
            spot = rng.randrange(min(len(changed), 256) if rng.random() < 0.6 else len(changed))
            changed[spot] = rng.choice((changed[spot] ^ (1 << rng.randrange(8)), rng.randrange(256)))
    return bytes(changed)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in nested mappings and lists."""
    if path:
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*path, key))


def changed(value: Any, rng: random.Random) -> Any:
    """Nested mappings and lists with hostile values in them, and things missing."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        found = list(places(value))
        if not found:
            return rng.choice(HOSTILE)
        *way, last = rng.choice(found)
        holder = value
        for key in way:
            holder = holder[key]
        what = rng.randrange(6)
        if what == 0:
            del holder[last]
        elif what == 1 and isinstance(holder, dict):
            holder[str(rng.choice(HOSTILE))[:300]] = rng.choice(HOSTILE)
        else:
            holder[last] = rng.choice(HOSTILE)
    return value


def recipes(folder: Path, rng: random.Random) -> Case:
    """A recipe that is wrong as text or in what it says."""
    preset = rng.choice(sorted(Path(isoscale.__file__).parent.glob("recipes/*/*.yaml")))
    text = preset.read_text()
    if rng.random() < 0.7:
        text = yaml.safe_dump(changed(yaml.safe_load(text), rng), allow_unicode=True)
    elif rng.random() < 0.5:
        lines = text.splitlines()
        lines.insert(rng.randrange(len(lines)), rng.choice(TAGS))
        text = "\n".join(lines)
    data = text.encode("utf-8", "surrogatepass")
    (folder / "recipe.yaml").write_bytes(data if rng.random() < 0.9 else broken(data, rng))
    words = rng.choice([
        ["recipe", "check", "recipe.yaml"], ["recipe", "show", "recipe.yaml"], ["data", "info", "recipe.yaml"],
        ["train", "recipe.yaml", "--dev", "1", *QUIET], ["submit", "recipe.yaml", "--dry-run"],
        ["sweep", "recipe.yaml", "seed=0,1", "--dry-run"],
    ])  # fmt: skip
    return Case(words, may_run=words[0] in ("train", "data"))


def overrides(folder: Path, rng: random.Random) -> Case:
    """Keys and values of a command line."""
    keys = [
        "train.epochs", "train.clip", "train.ema", "train.accumulate", "train.precision", "train.nan", "train.threads",
        "data.batch_size", "data.split", "data.workers", "data.subset", "data.transforms", "task.model.widths",
        "task.loss", "task.label_smoothing", "task.model.dropout", "optimizer.lr", "optimizer.name", "optimizer.betas",
        "schedule.name", "schedule.warmup", "checkpoint.every", "checkpoint.monitor", "checkpoint.keep",
        "observe.every", "observe.level", "observe.loggers", "seed", "name", "parallel.reduce", "task", "data",
        "~schedule", "extends",
    ]  # fmt: skip
    words = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = rng.choice(HOSTILE)
        text = value if isinstance(value, str) else json.dumps(value)
        words.append(f"{rng.choice(keys)}={text}".replace("\x00", "").encode("utf-8", "replace").decode())
    return Case(["train", "--dev", "1", *words, "observe.tensorboard=0"], may_run=True)


def run_files(folder: Path, rng: random.Random) -> Case:
    """A run of which one file is broken: run.json, the recipe, a checkpoint, the metrics."""
    shutil.copytree(folder / "whole", folder / "run", symlinks=True)
    files = sorted(path for path in (folder / "run").rglob("*") if path.is_file() and not path.is_symlink())
    path = rng.choice([file for file in files if file.suffix in (".json", ".yaml")] if rng.random() < 0.6 else files)
    data = path.read_bytes()
    if path.suffix == ".json" and rng.random() < 0.7:
        with suppress(ValueError):
            data = json.dumps(changed(json.loads(data), rng)).encode()
    else:
        data = broken(data, rng)
    path.write_bytes(data)
    return Case(rng.choice([
        ["train", "--run", "run", "train.epochs=3", *QUIET], ["test", "run"], ["predict", "run", "--out", "p.npz"],
        ["runs", "show", "run"], ["runs", "list", "."], ["report", "run", "--out", "r.html"],
        ["export", "run", "--out", "n.safetensors"], ["compare", "run", "whole"], ["reproduce", "run"],
        ["runs", "show", "run", "--json"],
    ]))  # fmt: skip


def data_files(folder: Path, rng: random.Random) -> Case:
    """A data file of any format with something wrong in it."""
    values = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)
    suffix = rng.choice(["npy", "npz", "csv", "h5", "raw", "safetensors", "txt", "idx", "parquet", "pt", "zarr"])
    path = folder / f"x.{suffix}"
    if suffix == "npz":
        np.savez(path, x=values)
    elif suffix in ("csv", "txt"):
        np.savetxt(path, values, delimiter="," if suffix == "csv" else " ")
    elif suffix == "h5":
        import h5py

        with h5py.File(path, "w") as file:
            file["x"] = values
    elif suffix == "npy":
        kind = rng.choice(["f4", "f8", ">f4", "i4", "?", "c8", "U3", "f2", "u1", "M8[s]", "V5"])
        np.save(path, np.zeros((rng.choice((0, 1, 64)), 5), kind) if kind in ("M8[s]", "V5") else values.astype(kind))
    elif suffix == "safetensors":
        from safetensors.numpy import save_file

        save_file({"x": values}, path)
    else:
        path.write_bytes(values.tobytes())
    if rng.random() < 0.8 and path.is_file():
        path.write_bytes(broken(path.read_bytes(), rng))
    (folder / "own.yaml").write_text(json.dumps({
        "task": {"class": "supervised", "model": {"class": "mlp", "widths": [4, 1]}, "loss": "mse"},
        "data": {"class": "files", "batch_size": 8, "split": {"train": 0.8, "val": 0.2},
                 "columns": {"input": {"path": path.name, "columns": ":4"},
                             "target": {"path": path.name, "columns": "4:"}}},
    }))  # fmt: skip
    return Case(rng.choice([["data", "info", "own.yaml"], ["train", "own.yaml", "--dev", "1", *QUIET],
                            ["data", "shuffle", path.name, "--out", "out*"]]))  # fmt: skip


def launchers(folder: Path, rng: random.Random) -> Case:
    """Variables of launchers that make no sense."""
    chosen = rng.sample(VARIABLES, rng.choice((1, 2, 3, 6)))
    values = [*HOSTILE[:40], "0", "1", "2", "3", "127.0.0.1", "node[1-3]", "2(x3)", "localhost"]
    variables = {
        name: str(rng.choice(values)).replace("\x00", "").encode("utf-8", "replace").decode()[:5000] for name in chosen
    }
    return Case(rng.choice([["train", "--dev", "1", *QUIET], ["doctor"]]), variables, may_wait=True)


COMMANDS = {each.__name__: each for each in (recipes, overrides, run_files, data_files, launchers)}


def complaint(case: Case, folder: Path) -> str | None:
    """What was wrong with the way in which a command took its case."""
    variables = {**os.environ, "ISOSCALE_CACHE": str(folder / "cache"), **case.variables}
    process = warm.Popen(
        command(*case.words), cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, process_group=0,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=20 if case.may_wait else PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None if case.may_wait else "hangs"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    said = (out + err).decode(errors="replace")
    if (folder / CANARY).exists() and not case.may_run:
        return "executed something"
    if process.returncode < 0:
        return f"ended by signal {-process.returncode}:\n{said[-2000:]}"
    if "Traceback" in said or "Error: " in said.replace("UserError: ", ""):
        return f"code {process.returncode}, with a traceback:\n{said[-4000:]}"
    if process.returncode not in (0, 75) and not any(word in said for word in ("error", "problem ")):
        return f"code {process.returncode} without a message:\n{said[-2000:]}"
    if b"\x1b[2J" in out + err:
        return f"sent an escape sequence to the terminal:\n{said[-2000:]!r}"
    return None


def listening(processes: list[int]) -> set[tuple[str, int]]:
    """Addresses at which processes listen."""
    import psutil

    found = set()
    for number in processes:
        with suppress(psutil.Error):
            connections = psutil.Process(number).net_connections(kind="tcp")
            found |= {(each.laddr.ip, each.laddr.port) for each in connections if each.status == psutil.CONN_LISTEN}
    return found


def bytes_to_ports(folder: Path, rng: random.Random, expected: str) -> str | None:
    """A training on two ranks, at whose ports strangers knock while it goes on."""
    from tests.parallel.processes import children

    words = ["train", "--run", "ranks", "train.epochs=8", "--devices", "2", "parallel.reduce=tree",
             "observe.level=warning", *QUIET]  # fmt: skip
    process = warm.Popen(
        command(*words), cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        known: set[tuple[str, int]] = set()
        while process.poll() is None:
            known |= listening([process.pid, *children(process.pid)])
            for host, port in known:
                payload = rng.choice([
                    rng.randbytes(rng.choice((1, 15, 1000, 100_000))), b'{"token":"\xc3\xa9"}\n', b"[" * 60_000 + b"\n",
                    b"\n" * 1000,
                    b"GET / HTTP/1.1\r\n\r\n", b"", b'{"hello": 1}\n',
                    b"\x80\x04c" + f"os\nsystem\n(S'touch {CANARY}'\ntR.".encode(),
                    (2**63).to_bytes(8, "little") * 10, bytes(10_000),
                ])  # fmt: skip
                with (
                    suppress(OSError),
                    socket.create_connection((host.replace("0.0.0.0", "127.0.0.1"), port), 0.5) as peer,
                ):
                    peer.sendall(payload)
                    if rng.random() < 0.3:
                        time.sleep(0.02)
        said = process.communicate(timeout=PATIENCE)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        return "hangs"
    finally:
        process.kill()
        process.wait()
    open_to_all = {each for each in known if not each[0].startswith("127.") and each[0] != "::1"}
    if (folder / CANARY).exists():
        return "executed something"
    if process.returncode or sha(folder / "ranks") != expected:
        return f"code {process.returncode} with strangers at {sorted(known)}:\n{said[-3000:]}"
    return f"listens to everybody: {open_to_all}" if open_to_all else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--log", type=Path, default=Path("fuzz.txt"))
    parser.add_argument(
        "--only", choices=[*COMMANDS, "bytes_to_ports"], nargs="*", default=[*COMMANDS, "bytes_to_ports"]
    )
    words = parser.parse_args()
    rng = random.Random(words.seed)
    base = Path(tempfile.mkdtemp(prefix="isoscale-fuzz-"))
    trainings = {"whole": ["train.epochs=2"], "alone": ["train.epochs=8", "parallel.reduce=tree"]}
    for name, more in trainings.items():
        warm.run(command("train", "--run", name, *more, *QUIET, "observe.level=error"), cwd=base, check=True)
    expected = sha(base / "alone")
    until = time.monotonic() + 60 * words.minutes
    counts: Counter[str] = Counter()
    failures = 0
    with words.log.open("w") as log:
        log.write(f"seed {words.seed}\n")
        while time.monotonic() < until:
            kind = rng.choice(
                [each for each in words.only if each != "bytes_to_ports" or rng.random() < 0.1] or words.only
            )
            seed = rng.randrange(2**32)
            folder = base / f"case{sum(counts.values())}"
            folder.mkdir()
            if kind == "bytes_to_ports":
                case, found = None, bytes_to_ports(folder, random.Random(seed), expected)
            else:
                shutil.copytree(base / "whole", folder / "whole", symlinks=True)
                case = COMMANDS[kind](folder, random.Random(seed))
                found = complaint(case, folder)
            counts[kind] += 1
            if found is None:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                failures += 1
                log.write(f"\n== {kind} in {folder}: {case}\n{found}\n")
                log.flush()
        log.write(f"\n{sum(counts.values())} cases, {failures} failures: {dict(counts)}\n")
    print(words.log.read_text().splitlines()[-1])
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
