"""Plants faults in copies of the source, one at a time, and sees which of them the tests find.

    python tests/mutants/run.py --tier test --only clipping "same order"

For each fault the tests run against its copy (PYTHONPATH, which processes that tests start inherit) until one fails:
first those near the file that has the fault, then the laws, then all others of the tier. A test counts as having found
a fault if it fails a second time, by itself, and passes on the source as it is; others are passed over. Tests that
hang, or that take the whole of pytest with them, have found the fault as well.
"""

import argparse
import compileall
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:  # as a script
    sys.path.insert(0, str(ROOT))

from tests.mutants.faults import FAULTS, Fault  # noqa: E402

SOURCE, TESTS = ROOT / "src", ROOT / "tests"
TIERS = {"test": "not full and not nightly and not cluster", "full": "full and not nightly and not cluster"}
PASSED, NO_TESTS, USAGE_ERROR = 0, 5, 4
"""Exit codes of pytest."""
LOOK_EVERY = 0.2
NOT_FOUND = "no test"


class Result(NamedTuple):
    """What became of a fault."""

    fault: Fault
    finder: str
    """The test that found it; empty if none did."""
    seconds: float

    @property
    def line(self) -> str:
        """For people."""
        word = "found" if self.finder else "NOT FOUND"
        by = f"  by {self.finder}" if self.finder else ""
        return f"{word:<9} {self.seconds:6.0f} s  {self.fault.topic}: {self.fault.name}{by}"


class Ended(NamedTuple):
    """How pytest ended."""

    code: int | None
    """None where it was hanging."""
    text: str

    @property
    def failed(self) -> list[str]:
        """The tests that failed, or the files that could not be read, in the order of the summary."""
        found = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", self.text, re.MULTILINE)
        return list(dict.fromkeys(found))


@dataclass
class Runner:
    """Runs the tests of a tier."""

    tier: str
    workers: int
    patience: float
    """Seconds without a test that ends, after which tests are hanging."""
    only_near: bool
    """Whether to leave out all tests but those near the fault and the laws."""
    folder: Path
    """For what the tests write, and for copies of the source."""
    original: Path
    """A copy of the source as it is."""
    _sound: dict[str, bool] = field(default_factory=dict)
    """Whether a test passes on the source as it is."""

    def find(self, fault: Fault) -> str:
        """The test that finds a fault, or what else shows it; empty if nothing does."""
        with planted(fault, self.original, self.folder) as source:
            for stage in stages(fault)[: -1 if self.only_near else None]:
                finder = self._search(source, stage)
                if finder:
                    return finder
        return ""

    def _search(self, source: Path, stage: Sequence[str]) -> str:
        passed_over: list[str] = []
        while True:
            words = [f"--deselect={test}" if "::" in test else f"--ignore={test}" for test in passed_over]
            ended = self._run(source, [*stage, *words], self.workers)
            if ended.code == USAGE_ERROR:
                raise SystemExit(f"pytest does not take {' '.join(stage)}:\n{ended.text[-3000:]}")
            if ended.code in (PASSED, NO_TESTS):
                return ""
            if ended.code is None:
                return f"tests that hang: none of {_named(stage)} ended for {self.patience:.0f} s"
            if not ended.failed:
                return f"the end of pytest itself, with exit code {ended.code}, in {_named(stage)}"
            for test in ended.failed:
                if self._has_found(source, test):
                    return test
                print(f"          passed over: {test}", flush=True)
            if set(ended.failed) <= set(passed_over):
                raise SystemExit(f"cannot leave out {', '.join(ended.failed)}:\n{ended.text[-3000:]}")
            passed_over += ended.failed

    def _has_found(self, source: Path, test: str) -> bool:
        """Whether a test that failed does so once more, by itself, and passes where nothing is planted."""
        if test not in self._sound:
            self._sound[test] = self._run(self.original, [test], 0).code == PASSED
        return self._sound[test] and self._run(source, [test], 0).code != PASSED

    def _run(self, source: Path, words: Sequence[str], workers: int) -> Ended:
        with tempfile.TemporaryDirectory(prefix="t", dir=self.folder, ignore_cleanup_errors=True) as scratch:
            output = Path(scratch) / "output.txt"
            command = [
                sys.executable, "-m", "pytest", "-x", "-v", "--tb=no", "--color=no", "-p", "no:cacheprovider",
                "-m", TIERS[self.tier], "-n", str(workers), "--dist", "worksteal", f"--basetemp={scratch}/p",
                "--ignore=tests/mutants", *words,
            ]  # fmt: skip
            with output.open("wb") as file:
                process = subprocess.Popen(
                    command, cwd=ROOT, env=variables(source), stdin=subprocess.DEVNULL, stdout=file,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
                code = self._waited(process, output)
            return Ended(code, output.read_text(encoding="utf-8", errors="replace"))

    def _waited(self, process: subprocess.Popen[bytes], output: Path) -> int | None:
        """The exit code; None, after an end by force, where nothing was written for too long."""
        size, heard = -1, time.monotonic()
        try:
            while process.poll() is None:
                if output.stat().st_size != size:
                    size, heard = output.stat().st_size, time.monotonic()
                if time.monotonic() - heard > self.patience:
                    return None
                time.sleep(LOOK_EVERY)
            return process.returncode
        finally:
            end_session(process.pid)
            process.wait()


def variables(source: Path) -> dict[str, str]:
    """The environment of tests that import isoscale from a source."""
    return {**os.environ, "PYTHONPATH": str(source), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


def end_session(session: int) -> None:
    """End what a run of tests has left behind; processes of a mutant may wait for each other for ever."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(path.name)) == session:
                os.kill(int(path.name), signal.SIGKILL)


def copied(folder: Path) -> Path:
    """A copy of the source as it is, compiled, which saves each process of the tests a few seconds."""
    copy = folder / "src"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    compileall.compile_dir(copy, quiet=2)
    return copy


@contextmanager
def planted(fault: Fault, original: Path, folder: Path) -> Iterator[Path]:
    """A copy of the source that has a fault."""
    with tempfile.TemporaryDirectory(prefix="m", dir=folder, ignore_cleanup_errors=True) as place:
        copy = Path(place) / "src"
        shutil.copytree(original, copy)
        file = copy / "isoscale" / fault.file
        file.write_text(with_fault(fault), encoding="utf-8")
        Path(cache_from_source(str(file))).unlink(missing_ok=True)
        yield copy


def with_fault(fault: Fault) -> str:
    """The text of the file with the fault in it."""
    text = (SOURCE / "isoscale" / fault.file).read_text(encoding="utf-8")
    count = text.count(fault.old)
    if count != 1:
        raise ValueError(f"{fault.name!r}: its text occurs {count} times in {fault.file}, and must occur once")
    return text.replace(fault.old, fault.new)


def stages(fault: Fault) -> list[list[str]]:
    """Which tests to run one after the other: near ones first, all others last, each file once."""
    path = Path(fault.file)
    module = ".".join(("isoscale", *path.with_suffix("").parts))
    folders = [sorted((TESTS / parent).glob("test_*.py")) for parent in path.parents]
    named = [test for test in _texts() if test.stem == f"test_{path.stem}"]
    mentioning = [test for test, text in _texts().items() if module in text]
    laws = [TESTS / "engine" / "test_golden.py", *sorted((TESTS / "laws").glob("test_*.py"))]
    groups = [[*named, *mentioning], *folders, laws]
    seen: set[Path] = set()
    found: list[list[str]] = []
    for group in groups:
        new = [test for test in dict.fromkeys(group) if test not in seen]
        seen.update(new)
        found += [[str(test.relative_to(ROOT)) for test in new]] if new else []
    rest = [f"--ignore={test.relative_to(ROOT)}" for test in sorted(seen)]
    return [*found, ["tests", *rest]]


@cache
def _texts() -> dict[Path, str]:
    """The files of tests that a tier may hold, by their paths."""
    left_out = {"cluster", "nightly", "mutants"}
    paths = [path for path in sorted(TESTS.rglob("test_*.py")) if not left_out & set(path.relative_to(TESTS).parts)]
    return {path: path.read_text(encoding="utf-8") for path in paths}


def _named(stage: Sequence[str]) -> str:
    words = [word for word in stage if not word.startswith("-")]
    return words[0] if len(words) == 1 else f"{words[0]} and {len(words) - 1} more"


def check_source(source: Path) -> None:
    """Refuse to go on where Python would take isoscale from somewhere else than from a copy."""
    ask = [sys.executable, "-c", "import isoscale; print(isoscale.__file__)"]
    said = subprocess.run(ask, cwd=ROOT, env=variables(source), capture_output=True, text=True, check=True).stdout
    if not Path(said.strip()).is_relative_to(source):
        raise SystemExit(f"isoscale comes from {said.strip()} and not from a copy of the source in {source}")


def by_topic(results: Sequence[Result]) -> list[tuple[str, int, int]]:
    """(topic, planted, found), and all together at the end."""
    topics = dict.fromkeys(result.fault.topic for result in results)
    rows = [(topic, [result for result in results if result.fault.topic == topic]) for topic in topics]
    return [(topic, len(own), sum(bool(result.finder) for result in own)) for topic, own in [*rows, ("all", results)]]


def markdown(results: Sequence[Result], tier: str, only_near: bool) -> str:
    """The record of a run."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    lines = [
        f"# Planted faults that the tests of `{tier}` find", "",
        f"{time.strftime('%Y-%m-%d')}, commit {commit.stdout.strip() or 'unknown'}, `python tests/mutants/run.py "
        f"--tier {tier}{' --near' * only_near}`. A fault is found if a test fails, or hangs.", "",
        "| topic | planted | found |", "|---|---:|---:|",
        *(f"| {topic} | {planted} | {found} |" for topic, planted, found in by_topic(results)), "",
        "| topic | fault | file | found by | seconds |", "|---|---|---|---|---:|",
    ]  # fmt: skip
    for result in results:
        fault, finder = result.fault, f"`{result.finder}`" if result.finder.startswith("tests/") else result.finder
        cells = (fault.topic, fault.name, f"`{fault.file}`", finder or f"**{NOT_FOUND}**", f"{result.seconds:.0f}")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])


def chosen(parts: Sequence[str]) -> list[Fault]:
    """The faults whose name or topic holds one of some words; all without any."""
    words = [part.lower() for part in parts]
    found = [fault for fault in FAULTS if not words or any(w in f"{fault.topic}: {fault.name}".lower() for w in words)]
    if not found:
        raise SystemExit(f"no fault is called {' or '.join(parts)}; their names are in tests/mutants/faults.py")
    return found


def arguments() -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description="Plant faults in copies of the source; which do the tests find?")
    parser.add_argument("--tier", choices=TIERS, default="test", help="which tests to run: those of `make …`")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="faults with this in name or topic")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write a record here, as Markdown")
    parser.add_argument("--near", action="store_true",
                        help="run only tests near a fault and the laws, which takes minutes and not hours")  # fmt: skip
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="tests at a time; 0: in one process")
    parser.add_argument("--patience", type=float, default=600, metavar="SECONDS",
                        help="without a test that ends, after which tests count as hanging")  # fmt: skip
    return parser.parse_args()


def main() -> None:
    """Plant the faults that are asked for, and tell what finds them."""
    given = arguments()
    faults = chosen(given.only)
    try:
        for fault in faults:
            with_fault(fault)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    results: list[Result] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # and the tests with it
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        original = copied(Path(folder))
        check_source(original)
        runner = Runner(given.tier, given.workers, given.patience, given.near, Path(folder), original)
        for fault in faults:
            began = time.monotonic()
            results.append(Result(fault, runner.find(fault), time.monotonic() - began))
            print(results[-1].line, flush=True)
            if given.output is not None:
                given.output.write_text(markdown(results, given.tier, given.near), encoding="utf-8")
    print(f"\n{'topic':<30} planted  found")
    for topic, planted_here, found_here in by_topic(results):
        print(f"{topic:<30} {planted_here:7d} {found_here:6d}")


if __name__ == "__main__":
    main()
