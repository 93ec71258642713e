"""The page about a run: reads what its files tell, and fills in the templates."""

import base64
import hashlib
import json
import re
import shlex
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, TemplateError
from markupsafe import Markup

from isoscale.engine.diagnose.memory import size
from isoscale.errors import KeyPath, UserError, dotted
from isoscale.observe.text import duration, number, plain_number, split_stage
from isoscale.recipe.load import load_resolved
from isoscale.recipe.presets import preset_names
from isoscale.recipe.problems import DEFAULT
from isoscale.runs import inference
from isoscale.runs.run import Run
from isoscale.study.compare import best
from isoscale.study.facts import Facts, read
from isoscale.study.report import charts, figures
from isoscale.study.report.charts import STAGES, Line
from isoscale.system.files import failures_in_words, write_aside
from isoscale.system.printing import visible

PARTS = {"val": "validation", "test": "test"}
"""What the parts of the data are called."""
QUIET = ("time/seconds",)
"""Curves that nobody looks at: time goes on."""
DECIDED = ("threads", "precision", "program")
"""What was decided at the first start, as far as people want to know it."""


def write_report(
    run: str | Path | Run, path: str | Path | None = None, split: str | None = "val", diff: bool = True
) -> Path:
    """Write the page about a run to RUN/report.html or elsewhere, and return where it is.

    The figures show the best weights applied to the `split` part of the data; None leaves them out. Without `diff`, the
    uncommitted changes of the user's code stay out.
    """
    found = run if isinstance(run, Run) else Run.find(str(run))
    target = Path(path) if path is not None else found.path / "report.html"
    if target.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out {target}: a report is written as .html")
    if not target.parent.is_dir():
        raise UserError(f"--out {target}: there is no folder {target.parent}; make it, or choose another one")
    facts = read(found)
    try:
        text = page(facts, split, diff)
    except (AttributeError, LookupError, TypeError, ValueError, TemplateError) as error:
        if isinstance(error, UserError):
            raise
        found_there = f"{type(error).__name__}: {error}"
        raise UserError(f"{found.directory.record} does not hold what a run writes there: {found_there}") from error
    with failures_in_words(target):
        write_aside(target, text.encode("utf-8", "replace"))
    return target


@cache
def templates() -> Environment:
    """The templates of the page; every text is escaped, and control characters are written out."""
    found = Environment(
        loader=PackageLoader("isoscale.study.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=lambda value: visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
    )
    found.filters |= {"number": number, "plain_number": plain_number, "duration": duration, "size": size}
    found.filters["thousands"] = "{:,}".format
    found.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return found


def page(facts: Facts, split: str | None, diff: bool = True) -> str:
    """The whole page."""
    record, settings = facts.record, read_settings(facts.run)
    script = _text("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return templates().get_template("page.html").render(
        facts=facts,
        record=record,
        code=record.get("code") or {},
        # Nothing is fetched, and no script runs but our own, whatever a run's files hold.
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        style=_text("page.css"),
        script=script,
        best=best(facts.curves[facts.monitor], facts.larger_is_better) if facts.monitor else None,
        heard=time.strftime("%Y-%m-%d %H:%M", time.localtime(facts.heard)) if facts.has_no_end and facts.heard else "",
        charts=[charts.chart(metric, lines) for metric, lines in lines_by_metric(facts).items()],
        results=_results(facts, split) if split else None,
        settings=settings,
        own=[setting for setting in settings if setting.is_own],
        environment=_environment(record),
        diff=diff,
        path=facts.run.path.resolve(),
        quoted=shlex.quote(str(facts.run.path.resolve())),
    )  # fmt: skip


def _text(name: str) -> Markup:
    """A file beside the templates, as it is."""
    loader = templates().loader
    assert loader is not None
    return Markup(loader.get_source(templates(), name)[0])


def lines_by_metric(facts: Facts) -> dict[str, list[Line]]:
    """The lines of one chart for each metric: the loss first, then other metrics, then what belongs to no stage."""
    found: dict[str, list[Line]] = {}
    for name, curve in facts.curves.items():
        stage, metric = split_stage(name)
        label, style = STAGES["train_epoch" if stage == "train" and name.endswith("_epoch") else stage]
        if name not in QUIET:
            found.setdefault(metric, []).append(Line(label or metric, style, curve))
    order = [style for _, style in STAGES.values()]
    lines = {metric: sorted(found[metric], key=lambda line: order.index(line.style)) for metric in found}
    return dict(sorted(lines.items(), key=lambda entry: (entry[0] != "loss", entry[1][0].style.name == "plain")))


def _results(facts: Facts, split: str) -> dict[str, Any]:
    """What the task shows of its best weights; a line in its place where that cannot be had."""
    if not facts.run.directory.checkpoints().pointed("last"):
        return {"words": "There is no checkpoint that results could be made with.", "figures": []}
    try:
        facts.run.to_build()
    except UserError as error:
        raise UserError(f"{error}\nfor a page without results: --no-figures") from None
    try:
        shown = inference.figures(facts.run, split=split)
    except Exception as error:  # task and data are the user's: whatever fails there, the rest of the page stands
        reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        return {"words": f"Results could not be made: {reason}", "figures": []}
    words = f"The {'best' if facts.run.has_best else 'last'} weights on the {PARTS[split]} data."
    nothing = "The task of this run shows no results besides its metrics."
    return {"words": words if shown else nothing, "figures": figures.results(shown)}


@dataclass(frozen=True)
class Setting:
    """A value of the recipe."""

    key: str
    value: Any
    origin: str
    """`images/digits.yaml:12`, `my.yaml:3`, `command line`, `Python call` or `default`."""

    @property
    def is_own(self) -> bool:
        """Whether the user decided about it, rather than a preset or a default."""
        file = re.sub(r":\d+$", "", self.origin)
        return self.origin != DEFAULT and file.removesuffix(".yaml") not in preset_names()

    @property
    def text(self) -> str:
        """The value as a recipe has it."""
        return self.value if isinstance(self.value, str) else json.dumps(self.value, ensure_ascii=False)


def read_settings(run: Run) -> list[Setting]:
    """Every setting of a run in the order of its recipe, a list as a whole, with the origin of its first entry."""
    loaded = load_resolved(run.directory.recipe)

    def entries(value: Any, path: KeyPath = ()) -> list[Setting]:
        if isinstance(value, dict) and value:
            return [entry for key, child in value.items() for entry in entries(child, (*path, key))]
        below = (origin for leaf, origin in loaded.origins.items() if leaf[: len(path)] == path)
        return [Setting(dotted(path), value, next(below, DEFAULT))]

    return entries(loaded.values)


def _environment(record: dict[str, Any]) -> dict[str, Any]:
    """Where and with what it ran."""
    decided, peak = record.get("decided", {}), record.get("peak_memory")
    words = [str(decided.get("device") or ""), *(f"{key} {decided[key]}" for key in DECIDED if key in decided)]
    why = f" ({decided['why']})" if decided.get("why") else ""
    return {
        "isoscale": record.get("isoscale"),
        "Python": record.get("python"),
        "packages": ", ".join(f"{name} {version}" for name, version in record.get("packages", {}).items()),
        "host": record.get("host"),
        "system": record.get("platform"),
        "device": ", ".join(filter(None, words)) + why,
        "command": shlex.join(record.get("command", [])),
        "seed": str(record.get("seed", "")),
        "data": ", ".join(f"{split} {fingerprint}" for split, fingerprint in record.get("data", {}).items()),
        "peak memory": size(peak) if peak else None,
        "code": (record.get("code") or {}).get("commit"),
    }
