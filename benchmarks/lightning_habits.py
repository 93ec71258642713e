"""Modules and scripts as people write them, trained by Lightning and by isoscale: what is equal, and why others not.

    python benchmarks/lightning_habits.py [--out FILE.md] [--only NAME ...]

The cases are those of `tests/engine/lightning/zoo`. Each is trained once by either side in this process, on the CPU
with one thread, in float32 unless the case says otherwise. Weights and buffers are compared to the bit; the number of
steps, the last metrics (to 1e-5) and what callbacks have kept are compared as well. The seconds are those of one whole
training of a few dozen steps, with making and closing the run: they say that nothing is out of proportion, not what a
step costs.
"""

import argparse
import contextlib
import io
import logging
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import lightning.pytorch
import torch

import isoscale

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.engine.lightning.zoo.case import Case
from tests.engine.lightning.zoo.cases import CASES
from tests.engine.lightning.zoo.compare import compared

EQUAL, MEANT, REFUSED, OTHER = "equal to the bit", "differs, as it must", "refused", "differs"


def row(case: Case) -> tuple[str, str]:
    """(The result, the row of the table) of a case."""
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                found = compared(case, Path(folder))
        except Exception as error:
            reason = " ".join(str(error).split()).replace("|", "/")
            result = REFUSED if case.refused and case.refused in reason else OTHER
            words = f"{REFUSED}: {reason}" if result == REFUSED else f"{type(error).__name__}: {reason}"
            return result, f"| {case.name} | {case.what} | {words} | | |"
    if case.difference and found.largest > 0:
        result, words = MEANT, f"{MEANT}, by up to {found.largest:.1g}: {case.difference}"
    elif found.largest == 0 and found.differences:
        result, words = OTHER, f"weights {EQUAL}, but {'; '.join(found.differences)}"
    elif found.differences:
        result, words = OTHER, f"{OTHER}, by up to {found.largest:.1g}: {'; '.join(found.differences)}"
    else:
        but = "; ".join(f"{name} differs: {why}" for name, why in case.of_step.items())
        result, words = EQUAL, f"{EQUAL}; {but}" if but else EQUAL
    ours, theirs = found.ours, found.theirs
    return result, f"| {case.name} | {case.what} | {words} | {theirs.seconds:.2f} | {ours.seconds:.2f} |"


def main() -> None:
    """Train every case twice and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    rows, load = [], os.getloadavg()[0]
    for case in CASES:
        if not options.only or case.name in options.only:
            rows.append(row(case))
            print(f"{case.name}: {rows[-1][0]}", file=sys.stderr, flush=True)
    counts = {result: sum(each == result for each, _ in rows) for result in (EQUAL, MEANT, REFUSED, OTHER)}
    text = [
        f"# Habits of Lightning, {time.strftime('%Y-%m-%d')}",
        "",
        f"`python benchmarks/lightning_habits.py`; {platform.machine()}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, lightning {lightning.pytorch.__version__}, isoscale {isoscale.__version__}; CPU, one "
        "thread, one training of each side. Weights and buffers are compared to the bit, steps exactly, last metrics "
        "and what callbacks keep to 1e-5. Lightning runs one sanity batch, because isoscale rehearses one; batches "
        "that a hook skips are not counted as steps; a metric that Lightning also shows as `name_epoch` is not "
        "compared under its bare name. Those that differ as they must are only seen to differ, in as many steps. "
        "Seconds are those of the whole training, on "
        f"{os.cpu_count()} cores with a load of {load:.1f} before the start.",
        "",
        f"{len(rows)} modules and scripts: {counts[EQUAL]} are equal to the bit, {counts[MEANT]} differ as they must, "
        f"{counts[REFUSED]} are refused in words, {counts[OTHER]} differ otherwise. 39 "
        "more that change themselves in training are compared in the same way "
        "by `tests/engine/lightning/test_habits.py`.",
        "",
        "| case | what it does | weights | Lightning, s | isoscale, s |",
        "|---|---|---|---|---|",
        *(words for _, words in rows),
        "",
    ]
    print("\n".join(text))
    if options.out:
        options.out.write_text("\n".join(text))


if __name__ == "__main__":
    sys.exit(main())
