"""Compare all values of the data of a run with what they were when it began."""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from isoscale.engine.settings import Decisions
from isoscale.errors import UserError
from isoscale.observe.observers import Observers
from isoscale.recipe.load import load_resolved
from isoscale.runs.fingerprint import Comparison, compare, fingerprints, read_record, write_record
from isoscale.runs.open import OpenedRun
from isoscale.runs.run import Run


@dataclass(frozen=True)
class DataCheck:
    """What `isoscale data check` prints."""

    path: str
    comparison: Comparison
    splits: list[str]
    """Roles of which some samples are not as they were."""

    @property
    def equal(self) -> bool:
        """Whether nothing is known to have changed, nor may have."""
        return not (self.splits or self.comparison.changed or self.comparison.doubtful)

    @property
    def lines(self) -> list[str]:
        """The result for people."""
        found = self.comparison
        lines = [f"changed: {name}: {how}" for name, how in sorted(found.changed.items())]
        lines += [f"may have changed: {name}: {how}" for name, how in sorted(found.doubtful.items())]
        lines += [f"changed: some samples of the {split} data" for split in self.splits if not found.changed]
        lines += [f"size and time as at the start, when it was not read whole; now it is: {name}"
                  for name in found.unread]  # fmt: skip
        verdict = "the data is what the run began with" if self.equal else "the data is not what the run began with"
        return [*lines, f"{self.path}: {verdict}; compared: {found.said}"]

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for programs."""
        found = self.comparison
        return {"path": self.path, "equal": self.equal, "changed": found.changed, "doubtful": found.doubtful,
                "samples": self.splits, "read": found.read, "unread": found.unread}  # fmt: skip


def check_data(run: Run) -> DataCheck:
    """Read all data of a run; what could not be compared now is written down, so that it can be the next time."""
    record = run.record
    if record.get("given"):
        raise UserError(
            f"the data of this run was given in Python with {record['given']}, and nothing but its script makes it "
            "again; to go on with the run in that script compares it"
        )
    before, known = record.get("data"), read_record(run.path)
    if before is None:
        raise UserError(f"{run.path} has not begun to train, and so has no data to compare")
    opened = OpenedRun(load_resolved(run.directory.recipe))
    settings = opened.settings
    anywhere = settings.train.model_copy(update={"device": "cpu", "precision": "auto", "program": "eager"})
    settings = replace(settings, train=anywhere)
    trainer = opened.another_trainer(settings, Decisions.make(settings), Observers([]))
    try:
        found = fingerprints(trainer.sources)
        splits = sorted(name for name in {**before, **found} if before.get(name) != found.get(name))
        comparison = compare(known, trainer.sources, cheap=False)
    finally:
        trainer.release()
    checked = DataCheck(str(run.path), comparison, splits)
    if checked.equal:
        with suppress(OSError):  # a run of somebody else's
            write_record(run.path, comparison.entries)
    return checked
