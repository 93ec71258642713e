"""A scaling study on this machine: every measurement is a training of its own, started as `--devices` starts one."""

import os
import sys
from collections.abc import Callable

from isoscale.errors import INTERRUPTED
from isoscale.launch.local import launch, num_cores
from isoscale.recipe.schema import Recipe
from isoscale.study.scale.study import Study, lines

THREADS = "OMP_NUM_THREADS"


def threads(most_ranks: int) -> int:
    """Threads of each rank, the same on any number of ranks, or else one rank would have all cores already."""
    asked = os.environ.get(THREADS, "")
    return int(asked) if asked.isdigit() and int(asked) else max(1, num_cores() // most_ranks)


def warning(recipe: Recipe, most_ranks: int) -> str | None:
    """What to know where ranks share cores or GPUs."""
    import torch

    from isoscale.engine import device as accelerators

    kind = accelerators.find(recipe.train.device).kind
    count = getattr(torch, kind).device_count() if kind in ("cuda", "xpu") else num_cores()
    what = "GPU" if kind in ("cuda", "xpu") else "core"
    if most_ranks <= count:
        return None
    return f"{most_ranks} ranks share {count} {what}{'s' * (count > 1)}: more ranks than that cannot be faster here"


def complete(study: Study, say: Callable[[str], None]) -> tuple[Study, int]:
    """Measure what is missing; the study as it is then, and the exit code of the ranks that failed, or 0."""
    for repeat, ranks in study.missing:
        words = [sys.argv[0], "scale", "--run", str(study.path), "--measure", f"{ranks}:{repeat}"]
        try:
            code = launch(ranks, words, {} if study.threads is None else {THREADS: str(study.threads)})
        except KeyboardInterrupt:  # before it listens, or after
            code = INTERRUPTED
        before, study = len(study.measurements), Study.read(study.path)
        if code != 0:
            return study, code
        for line in lines(study, before):
            say(line)
    return study, 0
