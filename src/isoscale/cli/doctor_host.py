"""What `isoscale doctor` looks at on one host."""

from collections.abc import Iterator
from pathlib import Path

from isoscale.cli.data import presence
from isoscale.data.files import data_folder
from isoscale.observe.doctor.checks import examine
from isoscale.observe.doctor.finding import Finding
from isoscale.observe.doctor.folders import folder
from isoscale.runs.directory import ROOT
from isoscale.science.registry import downloads


def of_host() -> Iterator[Finding]:
    """Every finding about this host, as it is made."""
    yield from examine()
    for subject, path in folders().items():
        yield folder(subject, path, must_be_writable=subject == "runs folder")
    there = [name for name, entry in downloads().items() if presence(entry)["present"]]
    yield Finding("data", "ok", f"there: {', '.join(there) or 'none'}; `isoscale data get` lists all")


def folders() -> dict[str, Path]:
    """The folders that a run writes and reads."""
    return {"runs folder": Path(ROOT), "data folder": data_folder()}
