"""One page about a run, in one file that needs nothing else: no network, and no script to be read."""

import base64
import hashlib
import time
from importlib.resources import files
from pathlib import Path

from isoscale.errors import UserError
from isoscale.observe.text import split_stage
from isoscale.runs import inference
from isoscale.runs.run import Run
from isoscale.study import figures, sections
from isoscale.study.facts import Facts, read
from isoscale.study.markup import Markup, element, joined
from isoscale.study.plot import Line, chart
from isoscale.system.files import failures_in_words, write_aside

STAGES = {
    "train": ("training, each log", "train-window"),
    "train_epoch": ("training, each epoch", "train"),
    "val": ("validation", "val"),
    "test": ("test", "test"),
    "": ("", "plain"),
}
"""What a curve is called, and its class in the style sheet."""
PARTS = {"val": "validation", "test": "test"}
"""What the parts of the data are called."""
QUIET = ("time/seconds",)
"""Curves that nobody looks at: time goes on."""


def write_report(
    run: str | Path | Run, path: str | Path | None = None, split: str | None = "val", diff: bool = True
) -> Path:
    """Write the page about a run to RUN/report.html or elsewhere, and return where it is.

    The figures show the best weights applied to the `split` part of the data; None leaves them out. Without `diff`, the
    uncommitted changes of the user's code stay out.
    """
    found = run if isinstance(run, Run) else Run.find(str(run))
    target = Path(path) if path is not None else found.path / "report.html"
    _check_path(target)
    facts = read(found)
    try:
        text = page(facts, split, diff)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        found_there = f"{type(error).__name__}: {error}"
        raise UserError(f"{found.directory.record} does not hold what a run writes there: {found_there}") from error
    with failures_in_words(target):
        write_aside(target, text.encode("utf-8", "replace"))
    return target


def _check_path(path: Path) -> None:
    if path.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out {path}: a report is written as .html")
    if not path.parent.is_dir():
        raise UserError(f"--out {path}: there is no folder {path.parent}; make it, or choose another one")


def page(facts: Facts, split: str | None, diff: bool = True) -> str:
    """The whole page."""
    style, script = (
        files("isoscale.study").joinpath("page", name).read_text("utf-8") for name in ("page.css", "page.js")
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{facts.label}, {facts.status}"),
        element("style", Markup(style)),
    )
    body = element("body", element("main", *_body(facts, split, diff)), element("script", Markup(script)))
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _policy(script: str) -> str:
    """Nothing is fetched, and no script runs but our own, whatever a run's files hold."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _body(facts: Facts, split: str | None, diff: bool) -> list[Markup | None]:
    return [
        sections.header(facts),
        sections.tiles(facts),
        _section("Curves", _curves(facts)),
        _section("Results", _results(facts, split)) if split else None,
        _section("Layers", sections.layers(facts)),
        _section("Where the time went", sections.profile(facts)),
        _section("Settings", sections.settings(facts)),
        _section("Environment", sections.environment(facts, diff)),
        _section("Reproduce it", sections.commands(facts, diff)),
        element("footer", f"Written {time.strftime('%Y-%m-%d %H:%M')} from {facts.run.path.resolve()}"),
    ]


def _section(title: str, body: Markup | None) -> Markup | None:
    return element("section", element("h2", title), body) if body else None


def _curves(facts: Facts) -> Markup:
    charts = [chart(metric, lines) for metric, lines in lines_by_metric(facts).items()]
    if not charts:
        return element("p", "Nothing was logged.")
    return joined([_step_or_time(), element("div", *charts, class_="charts")])


def _step_or_time() -> Markup:
    """The switch between the two horizontal axes; the style sheet does the switching."""
    choices = [
        element(
            "label", element("input", type="radio", name="by", id=f"by-{name}", checked=name == "step"), f" by {name}"
        )
        for name in ("step", "time")
    ]
    return element("div", *choices, class_="switch", role="group", aria_label="horizontal axis")


def lines_by_metric(facts: Facts) -> dict[str, list[Line]]:
    """The lines of one chart for each metric: the loss first, then other metrics, then what belongs to no stage."""
    found: dict[str, list[Line]] = {}
    for name, curve in facts.curves.items():
        stage, metric = split_stage(name)
        kind = "train_epoch" if stage == "train" and name.endswith("_epoch") else stage
        label, style = STAGES[kind]
        if name not in QUIET:
            found.setdefault(metric, []).append(Line(label or metric, style, curve))
    order = [style for _, style in STAGES.values()]
    lines = {metric: sorted(found[metric], key=lambda line: order.index(line.style)) for metric in found}
    return dict(sorted(lines.items(), key=lambda entry: (entry[0] != "loss", entry[1][0].style == "plain")))


def _results(facts: Facts, split: str) -> Markup:
    """What the task shows of its best weights; a line in its place where that cannot be had."""
    if not facts.run.directory.checkpoints().pointed("last"):
        return element("p", "There is no checkpoint that results could be made with.")
    try:
        facts.run.to_build()
    except UserError as error:
        raise UserError(f"{error}\nfor a page without results: --no-figures") from None
    try:
        results = inference.figures(facts.run, split=split)
    except Exception as error:  # task and data are the user's: whatever fails there, the rest of the page stands
        return element("p", f"Results could not be made: {_words(error)}")
    if not results:
        return element("p", "The task of this run shows no results besides its metrics.")
    words = f"The {'best' if facts.run.has_best else 'last'} weights on the {PARTS[split]} data."
    return joined([element("p", words), element("div", figures.shown(results), class_="figures")])


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
