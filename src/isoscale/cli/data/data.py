"""`isoscale data`: fetch data sets and weights, and look at what is there."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isoscale.cli import complete
from isoscale.cli.arguments import Trust
from isoscale.cli.data import files as data_files
from isoscale.cli.data.words import progress, split_words
from isoscale.cli.output import print_json
from isoscale.cli.train.apply import RUN
from isoscale.science import registry
from isoscale.science.domain import load
from isoscale.system.printing import echo

if TYPE_CHECKING:
    from isoscale.data.tools.downloads import Fetching
    from isoscale.data.tools.published import Entry
    from isoscale.science.domain import Describer


ANYTHING = "file, folder, recipe or data set"
"""That `info` looks at."""

OPTIONS = "; ".join(describer.options for describer in registry.describers())

app = typer.Typer(help="Fetch data, look at it, shuffle it and make it.", no_args_is_help=True)
app.command()(data_files.shuffle)
app.command()(data_files.make)


@app.command()
def check(
    run: RUN = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
    trust: Trust = False,
) -> None:
    """Read all data of a run and compare it with what it was when the run began.

    Exit code 0: nothing has changed. 1: something has, or may have. 2: cannot be done.
    """
    from isoscale.runs.run import Run
    from isoscale.study.data_check import check_data

    found = check_data(Run.find(run, trust=trust))
    if as_json:
        print_json(found.as_dict())
    else:
        echo("\n".join(found.lines))
    if not found.equal:
        raise typer.Exit(1)


@app.command()
def get(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="What to fetch; left out, a list.", autocompletion=complete.published),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="DIR", help="The data folder; by default $ISOSCALE_DATA, or data."),
    ] = None,
    from_: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Take files that lie in DIR or below it, instead of the network."),
    ] = None,
    mirror: Annotated[
        str | None, typer.Option("--mirror", metavar="URL", help="Another address that holds the published files.")
    ] = None,
) -> None:
    """Fetch a data set or weights, check them, and put them where recipes look for them."""
    from isoscale.data.files import data_folder
    from isoscale.data.tools.downloads import Fetching
    from isoscale.errors import UserError

    if name is None:
        _print_catalog()
        return
    if from_ is not None and mirror is not None:
        raise UserError("--from takes files from a folder and --mirror from the network; leave one of them out")
    entry = _entry(name)
    fetching = Fetching(entry, to or data_folder())
    _bring(fetching, from_, mirror)
    echo(f"next: {entry.usage.format(folder=fetching.home)}")


def _bring(fetching: "Fetching", folder: Path | None, mirror: str | None) -> None:
    name, home = fetching.entry.name, fetching.home
    if not fetching.wanted:
        echo(f"{name} is in {home} already, and whole")
        return
    for path in fetching.damaged:
        echo(f"{path} is damaged and will be replaced")
    if folder is not None:
        fetching.from_folder(folder)
    else:
        with progress() as report:
            fetching.from_network(mirror, report)
    echo(f"{name} is in {home}")


def _print_catalog() -> None:
    entries = registry.downloads()
    width = max(map(len, entries))
    for entry in entries.values():
        echo(f"{entry.name:<{width}}  {entry.title}")
    echo("\nfetch one: isoscale data get NAME")


def _entry(name: str, kind: str = "data set or weights") -> "Entry":
    """What can be fetched under a name; `kind` is what a name may be."""
    from isoscale.errors import UserError, nearest

    entries = registry.downloads()
    if name not in entries:
        suggestion = nearest(name, entries)
        meant = f'; did you mean "{suggestion}"?' if suggestion else f"; there is {', '.join(entries)}"
        raise UserError(f'there is no {kind} called "{name}"{meant}')
    return entries[name]


@app.command()
def info(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A data set, weights, a recipe, or a file or pattern; left out, all.",
            autocompletion=complete.described,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help=f"Changes of a recipe, such as data.path=DIR; of files, dataset=NAME; {OPTIONS}.",
        ),
    ] = None,
    path: Annotated[
        str | None, typer.Option("--path", metavar="DIR", help="Where a data set's files lie, if not as usual.")
    ] = None,
    trust: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Say what data there is: samples, shapes, types, values, classes, and whether the files are right."""
    from isoscale.errors import UserError

    published = registry.downloads()
    if path is not None and name not in published:
        raise UserError(f"--path says where a data set lies: name one of {', '.join(published)}")
    if name is None:
        _show_all(as_json)
        return
    describer = _describer(name) if name not in published else None
    if describer is not None:
        described = load(describer.of_paths)(*split_words([name, *(overrides or [])]))
    elif _names_files(name):
        _show_files([name, *(overrides or [])], as_json)
        return
    elif name not in published and ("/" in name or "." in name):
        described, describer = _recipe_facts(name, overrides or [], trust)
    else:
        described = _published_facts(_entry(name, ANYTHING), path)
    if as_json:
        print_json(described)
    elif describer is not None:
        echo("\n".join(load(describer.lines)(described)))
    else:
        _print_facts(described)


def _describer(name: str) -> "Describer | None":
    """Which science knows the data at a path, or the first that fits a pattern; a preset comes before a folder."""
    import glob

    from isoscale.recipe.presets import preset_names

    path = Path(name.partition("#")[0]).expanduser()
    first = name if path.exists() else next(iter(sorted(glob.glob(str(path), recursive=True))), None)
    if first is None or name in preset_names():
        return None
    return next((each for each in registry.describers() if load(each.recognises)(first)), None)


def _names_files(name: str) -> bool:
    """Whether a name means files: a file wins over all else, but a folder not over a data set or preset of its name."""
    import glob

    from isoscale.data.formats.opening import SUFFIXES
    from isoscale.recipe.presets import preset_names

    path = Path(name).expanduser()
    if path.suffix.lower() in (".yaml", ".yml", ".json"):
        return False
    if name in registry.downloads() or name in preset_names():
        return path.is_file()
    return path.exists() or glob.has_magic(name) or path.suffix.lower() in SUFFIXES


def _show_files(words: list[str], as_json: bool) -> None:
    from isoscale.data.tools.describe import describe_files

    paths, options = split_words(words)
    described = {path: describe_files(path, options) for path in paths}
    if as_json:
        print_json({"paths": described})
        return
    for path, facts in described.items():
        _print_file(path, facts)


def _print_file(path: str, facts: dict[str, Any]) -> None:
    from isoscale.observe.text import plain_number, table

    rows = [("files", f"{facts['files']:,}, {facts['bytes']:,} bytes")]
    for name, found in facts["columns"].items():
        shape = "×".join("?" if length is None else str(length) for length in found["shape"]) or "one value"
        rows.append((name, f"{found['rows']:,} rows, {shape}, {found['dtype']}"))
        mean = "" if found["mean"] is None else f", mean {plain_number(found['mean'])}"
        rows.append(("  values", _range(found) + mean))
        rows += [(f"  {word}", f"{found[word]:,}") for word in ("nan", "infinite") if found[word]]
        rows.append(("  fingerprint", found["fingerprint"]))
    echo("\n".join([path, *table(rows)]))


def _show_all(as_json: bool) -> None:
    """What is there of all that can be fetched; quick, so that nothing is read."""
    from isoscale.data.files import data_folder
    from isoscale.data.tools.published import presence

    entries = {name: presence(entry) for name, entry in registry.downloads().items()}
    if as_json:
        print_json({"folder": str(data_folder()), "entries": entries})
        return
    width = max(map(len, entries))
    echo(f"data folder: {data_folder()}")
    for name, facts in entries.items():
        there = f"{facts['path']}, {_megabytes(facts['bytes'])}" if facts["present"] else f"isoscale data get {name}"
        echo(f"  {name:<{width}}  {'there  ' if facts['present'] else 'missing'}  {there}")


def _published_facts(entry: "Entry", path: str | None) -> dict[str, Any]:
    from isoscale.data.files import wrong_files
    from isoscale.data.tools.published import locate, presence
    from isoscale.recipe.components import instantiate

    files = locate(entry, path)
    checked = {key: file for key, file in files.items() if key in entry.files}
    wrong = [str(file) for file in wrong_files(checked, entry.files)]
    facts = {"name": entry.name, "title": entry.title, **presence(entry, path), "damaged": wrong}
    facts["checksum"] = None if not checked else not wrong
    if entry.name in registry.short_names() and not wrong:
        facts["roles"] = _splits(instantiate({"class": entry.name, "path": path, "val": 0}))
    return facts


def _recipe_facts(name: str, overrides: list[str], is_trusted: bool) -> "tuple[dict[str, Any], Describer | None]":
    """What is known of the data of a recipe, and the science that knows it, where it is not just samples."""
    from isoscale.recipe import trust
    from isoscale.recipe.components import data_spec, instantiate
    from isoscale.recipe.load import load_recipe

    trusted = trust.Trust.ALL if is_trusted else trust.Trust.PROJECT
    loaded = load_recipe(name, overrides, check_components=True, trust=trusted)
    data = instantiate(data_spec(loaded.recipe.data))
    facts = {"name": loaded.name, "title": f"the data of {name}: {loaded.recipe.data.class_}"}
    for describer in registry.describers():
        known = load(describer.of_recipe)(data, loaded.values)
        if known is not None:
            return {**facts, **known}, describer
    return {**facts, "roles": _splits(data)}, None


def _splits(data: Any) -> dict[str, Any]:
    from isoscale.data.sources import SPLITS, Sources
    from isoscale.data.tools.describe import describe
    from isoscale.errors import UserError

    if not isinstance(data, Sources):
        raise UserError(f"the data is a {type(data).__name__}, which does not say how many samples of what it has")
    sources = {split: getattr(data, split) for split in SPLITS}
    return {split: describe(source) for split, source in sources.items() if source is not None}


def _print_facts(facts: dict[str, Any]) -> None:
    from isoscale.observe.text import table

    rows: list[tuple[str, str]] = []
    if "path" in facts:
        verdicts = {True: "the published files", False: f"damaged: {', '.join(facts['damaged'])}", None: "not checked"}
        rows += [("files", f"{facts['path']}, {_megabytes(facts['bytes'])}"), ("checksum", verdicts[facts["checksum"]])]
        rows += [("repair", f"isoscale data get {facts['name']}")] * bool(facts["damaged"])
    for split, described in facts.get("roles", {}).items():
        rows += _split_rows(split, described)
    echo("\n".join([facts["title"], *table(rows)]))


def _split_rows(split: str, described: dict[str, Any]) -> list[tuple[str, str]]:
    from isoscale.observe.text import plain_number

    looked_at = described["looked_at"]
    of_some = f", values of {looked_at:,} of them" if looked_at < described["samples"] else ""
    rows = [(split, f"{described['samples']:,} samples{of_some}")]
    for name, numbers in described["parts"].items():
        rows.append((f"  {name}", ", ".join(f"{plain_number(value)} {unit}" for unit, value in numbers.items())))
    for name, tensor in described["tensors"].items():
        shape = "×".join(map(str, tensor["shape"])) or "one value"
        rows.append((f"  {name}", f"{tensor['dtype']}, {shape}, {_range(tensor)}"))
    for counts in described["classes"].values():
        words = [f"{name} {count:,}" for name, count in counts.items()][:100]
        lines = [", ".join(words[start : start + 5]) for start in range(0, len(words), 5)]
        rows.append(("  classes", "\n".join(lines)))
    return rows


def _range(tensor: dict[str, Any]) -> str:
    from isoscale.observe.text import plain_number

    low, high = tensor["min"], tensor["max"]
    return "no values" if low is None else f"{plain_number(low)} to {plain_number(high)}"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
