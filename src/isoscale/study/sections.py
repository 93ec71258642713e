"""The parts of the page about a run that are words and numbers."""

import json
import shlex
import time
from typing import Any

from isoscale.engine.diagnose.memory import size
from isoscale.observe.text import duration, number, plain_number
from isoscale.study.compare import best
from isoscale.study.facts import Facts
from isoscale.study.markup import Markup, element, facts_list, folded, joined, table
from isoscale.study.settings import Setting, read_settings

DECIDED = ("threads", "precision", "program")
"""What was decided at the first start, as far as people want to know it."""


def header(facts: Facts) -> Markup:
    """Name, status, and why it ended where it did."""
    record = facts.record
    started = str(record.get("started", ""))[:16].replace("T", " ")
    heard = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts.heard)) if facts.has_no_end and facts.heard else ""
    entries = (("recipe", record.get("name")), ("started", started), ("last heard of", heard))
    words = " · ".join(f"{label} {text}" for label, text in entries if text)
    return element(
        "header",
        element("h1", facts.label),
        element("p", element("span", facts.status, class_=f"status {facts.status}"), words),
        element("pre", facts.message, class_=f"message {facts.status}") if facts.message else None,
    )


def tiles(facts: Facts) -> Markup:
    """The few numbers that people ask for first."""
    entries = [_best_tile(facts), *_progress_tiles(facts), *_machine_tiles(facts)]
    return element("div", *(_tile(*entry) for entry in entries if entry), class_="tiles")


def _tile(label: str, value: str, detail: str = "") -> Markup:
    texts = [
        element("span", text, class_=kind) for kind, text in (("label", label), ("value", value), ("detail", detail))
    ]
    return element("div", *texts, class_="tile")


def _best_tile(facts: Facts) -> tuple[str, ...] | None:
    point = best(facts.curves[facts.monitor], facts.larger_is_better) if facts.monitor else None
    return (f"best {facts.monitor}", number(point.value), f"epoch {point.epoch}, step {point.step}") if point else None


def _progress_tiles(facts: Facts) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    if facts.step is not None:
        whole = f"of {facts.num_steps:,}" if facts.num_steps else ""
        found.append(("steps", f"{facts.step:,}", whole))
    if facts.seconds is not None:
        found.append(("training time", duration(facts.seconds)))
    if facts.samples_per_second is not None:
        found.append(("rate", plain_number(facts.samples_per_second), "samples per second"))
    return found


def _machine_tiles(facts: Facts) -> list[tuple[str, ...]]:
    decided = facts.record.get("decided", {})
    found: list[tuple[str, ...]] = []
    if facts.device:
        detail = f"precision {decided.get('precision')}, {decided.get('program')}"
        found.append(("device", facts.device, detail))
    if facts.num_parameters is not None:
        found.append(("parameters", f"{facts.num_parameters:,}"))
    return found


def layers(facts: Facts) -> Markup | None:
    """The table of the model's layers."""
    rows = facts.record.get("layers")
    if not rows:
        return None
    return table(("layer", "kind", "output", "parameters", "trainable", "size"), map(_layer, rows), "numbers layers")


def _layer(row: dict[str, Any]) -> list[str]:
    """A row, the model itself under a word of its own."""
    indent = element(
        "span", row["name"].rpartition(".")[2] or "model", style=f"--depth:{row['depth']}", title=row["name"]
    )
    shape = " × ".join(map(str, row["shape"])) if row.get("shape") else ""
    return [
        indent, row["kind"], shape, f"{row['num_parameters']:,}", f"{row['num_trainable']:,}", size(row["num_bytes"]),
    ]  # fmt: skip


def profile(facts: Facts) -> Markup | None:
    """What the time was spent on, where the run was profiled; the last entry is the total."""
    actions = facts.record.get("profile")
    if not actions:
        return None
    total = actions[-1]["seconds"] or 1.0
    heads = ("action", "share", "", "seconds", "calls", "each")
    return table(heads, (_action(action, action["seconds"] / total) for action in actions), "numbers")


def _action(action: dict[str, Any], share: float) -> list[str]:
    bar = element("span", class_="bar", style=f"--share:{100 * share:.1f}%")
    each = 1000 * action["seconds"] / max(1, action["calls"])
    texts = [f"{action['seconds']:.3f}", f"{action['calls']:,}", f"{plain_number(each)} ms"]
    return [action["name"], f"{100 * share:.1f} %", bar, *texts]


def settings(facts: Facts) -> Markup:
    """What the user decided, then everything."""
    found = read_settings(facts.run)
    own = [setting for setting in found if setting.is_own]
    heads = ("setting", "value", "written in")
    nothing = element("p", "Nothing was set besides what the preset says.")
    first = table(heads, map(_setting, own), "own") if own else nothing
    return joined([first, folded(f"all {len(found)} settings", table(heads, map(_setting, found)))])


def _setting(setting: Setting) -> list[str]:
    text = setting.value if isinstance(setting.value, str) else json.dumps(setting.value, ensure_ascii=False)
    return [element("code", setting.key), element("code", text), setting.origin]


def environment(facts: Facts, diff: bool) -> Markup:
    """Where and with what it ran; with `diff`, also which changes of the code were not committed."""
    record = facts.record
    code = record.get("code") or {}
    packages = ", ".join(f"{name} {version}" for name, version in record.get("packages", {}).items())
    data = ", ".join(f"{split} {fingerprint}" for split, fingerprint in record.get("data", {}).items())
    peak = record.get("peak_memory")
    rows = [
        ("isoscale", record.get("isoscale")),
        ("Python", record.get("python")),
        ("packages", packages),
        ("host", record.get("host")),
        ("system", record.get("platform")),
        ("device", _decided(record.get("decided", {}))),
        ("command", shlex.join(record.get("command", []))),
        ("seed", str(record.get("seed", ""))),
        ("data", data),
        ("peak memory", size(peak) if peak else None),
        ("code", code.get("commit")),
    ]
    changes = code.get("diff") if diff else None
    return joined([
        facts_list(rows), folded("uncommitted changes of the code", element("pre", changes)) if changes else None,
    ])  # fmt: skip


def _decided(decided: dict[str, Any]) -> str:
    words = [str(decided.get("device") or ""), *(f"{key} {decided[key]}" for key in DECIDED if key in decided)]
    why = f" ({decided['why']})" if decided.get("why") else ""
    return ", ".join(filter(None, words)) + why


def _pinned(packages: dict[str, str]) -> str:
    """The library whose version moves the last bits; without the mark of its build, which an index does not know."""
    return f"torch=={packages['torch'].partition('+')[0]}" if "torch" in packages else ""


def commands(facts: Facts, diff: bool) -> Markup:
    """What to type to have the run again, to go on with it and to measure it."""
    record, path = facts.record, shlex.quote(str(facts.run.path.resolve()))
    if record.get("given"):
        return element("p", f"The task of this run, {record['given']}, was given in Python: its script makes it again.")
    code = record.get("code") or {}
    again = [
        *([f"git checkout {code['commit']}"] if code.get("commit") else []),
        f"pip install isoscale=={record.get('isoscale')} {_pinned(record.get('packages', {}))}".rstrip(),
        f"isoscale train {path}/recipe.yaml",
    ]
    where = "stand above" if diff else "are in run.json, and not on this page"
    changes = f"The code had changes that were not committed; they {where}." if code.get("diff") else None
    return joined([
        element("p", "The same run again:"), element("pre", "\n".join(again)),
        element("p", changes) if changes else None,
        element("p", "Go on with it, and measure it on its test data:"),
        element("pre", f"isoscale train --run {path}\nisoscale test {path}"),
    ])  # fmt: skip
