"""`isoscale doctor`: is this machine ready to train?"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isoscale.cli.output import print_json
from isoscale.errors import USER_CAN_FIX

if TYPE_CHECKING:
    from isoscale.observe.doctor import Finding


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check what training needs on this machine, and say what to do where something is missing."""
    from dataclasses import asdict

    findings = []
    for finding in _findings():
        findings.append(finding)
        if not as_json:
            print(_line(finding), flush=True)
    num_problems = sum(finding.verdict == "problem" for finding in findings)
    if as_json:
        print_json({"ok": num_problems == 0, "findings": [asdict(finding) for finding in findings]})
    if num_problems:
        raise typer.Exit(USER_CAN_FIX)


def _findings() -> Iterator["Finding"]:
    from isoscale.data.files import data_folder
    from isoscale.engine.run_directory import ROOT
    from isoscale.observe.doctor import examine, folder

    yield from examine()
    yield folder("runs folder", Path(ROOT), must_be_writable=True)
    yield folder("data folder", data_folder(), must_be_writable=False)
    yield _data_sets()


def _data_sets() -> "Finding":
    from isoscale.cli.data import presence
    from isoscale.observe.doctor import Finding
    from isoscale.science.catalog import CATALOG

    there = [name for name, entry in CATALOG.items() if presence(entry)["present"]]
    return Finding("data", "ok", f"there: {', '.join(there) or 'none'}; `isoscale data get` lists all")


def _line(finding: "Finding") -> str:
    advice = f": {finding.advice}" if finding.advice else ""
    return f"{finding.verdict:<8} {finding.subject:<14} {finding.text}{advice}"
