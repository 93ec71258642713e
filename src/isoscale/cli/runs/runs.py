"""`isoscale runs list|show`, `compare`, `report` and `reproduce`: what was trained."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from isoscale.cli import complete
from isoscale.cli.arguments import Trust
from isoscale.cli.output import print_columns, print_json
from isoscale.cli.runs import send
from isoscale.cli.train.apply import RUN
from isoscale.system.printing import echo

if TYPE_CHECKING:
    from isoscale.study.sweep.plan import Sweep


app = typer.Typer(help="Look at runs, and send them on.", no_args_is_help=True)
TITLES = ("run", "status", "step", "best", "started")
app.command("send")(send.send)


@app.command("list")
def list_(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The folder of runs, or of a sweep.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the runs as JSON.")] = False,
) -> None:
    """List the runs in a folder, oldest first, a sweep as one of them; of a sweep's folder its points, best first."""
    from isoscale.runs.directory import ROOT
    from isoscale.runs.run import Run
    from isoscale.study.sweep.plan import Sweep
    from isoscale.study.sweep.states import summary_of

    if not folder.exists() and Sweep.exists(ROOT / folder):
        folder = ROOT / folder
    if Sweep.exists(folder):
        _list_points(Sweep.read(folder), as_json)
        return
    runs = [run.summary_if_readable() for run in Run.all(folder)]
    sweeps = [summary_of(path) for path in Sweep.all(folder)]
    summaries = sorted([*runs, *sweeps], key=lambda summary: str(summary["started"] or ""))
    if as_json:
        print_json(summaries)
        return
    if not summaries:
        echo(f"no runs in {folder}; start one with `isoscale train`")
        return
    print_columns([TITLES, *(_row(summary, folder) for summary in summaries)])


def _list_points(sweep: "Sweep", as_json: bool) -> None:
    from isoscale.study.sweep.states import as_dict, best_first, states_of, table

    states = best_first(sweep, states_of(sweep))
    if as_json:
        print_json([as_dict(sweep, state) for state in states])
        return
    print_columns(table(sweep, states))


def _row(summary: dict[str, Any], folder: Path) -> tuple[str, ...]:
    from isoscale.runs.directory import ROOT

    path = Path(summary["path"])
    name = path.name if folder == ROOT else str(path)  # what `isoscale test` takes from here
    step, total = summary["step"], summary["num_steps"]
    steps = f"{0 if step is None else step}/{total}" if total is not None else ""
    started = str(summary["started"] or "")[:16].replace("T", " ")
    return name, summary["status"], steps, _best(summary).removeprefix("val/"), started


def _best(summary: dict[str, Any]) -> str:
    from isoscale.observe.text import number

    best = summary["best"]
    return f"{best['name']} {number(best['value'])}" if best and best["value"] is not None else ""


@app.command("show")
def show(
    run: RUN = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Show where a run stands: status, step, metrics, hash of the weights."""
    from isoscale.observe.text import number, plain_number, table
    from isoscale.runs.run import Run

    summary = Run.find(run).summary()
    if as_json:
        print_json(summary)
        return
    where = f"epoch {summary['epoch']}, step {summary['step']} of {summary['num_steps']}"
    at = f" at step {summary['best']['step']}" if _best(summary) else ""
    rows = [
        ("recipe", summary["name"]),
        ("status", summary["status"] + (f", {where}" if summary["epoch"] is not None else "")),
        ("message", summary["message"]),
        ("started", str(summary["started"] or "")[:19].replace("T", " ")),
        ("training", f"{summary['seconds']:.1f} s" if summary["seconds"] is not None else ""),
        ("best", _best(summary) + at),
        ("weights", f"sha256 {summary['weights_sha256']}" if summary["weights_sha256"] else ""),
    ]
    echo("\n".join([summary["path"], *table([(label, text) for label, text in rows if text])]))
    stages = ("train/", "val/", "test/")
    metrics = {
        name: number(value) if name.startswith(stages) else plain_number(value)
        for name, value in summary["metrics"].items()
    }
    if metrics:
        width = max(map(len, metrics))
        echo("\nlast metrics:", *(f"  {name:<{width}}  {text}" for name, text in metrics.items()), sep="\n")


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN", help="Directories or names of runs, or a folder of runs.", autocompletion=complete.runs
        ),
    ],
    to: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Measure the steps and the time to here; by default to what the worst run managed at its best.",
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A metric to show, such as val/loss; may be given several times."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The picture, as .png, .svg or .pdf; by default compare.png here, none beside --json."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Compare runs: how good, how fast, and what was different; with their curves in one picture."""
    from isoscale.study import charts
    from isoscale.study.compare import compare as compare_runs
    from isoscale.study.table import text

    picture = out or (None if as_json else Path("compare.png"))
    if picture is not None:
        charts.check_path(picture)
    comparison = compare_runs(runs, to, metric or ())
    drawn = picture is not None and charts.draw(comparison, picture)
    if as_json:
        print_json(comparison.as_dict())
    else:
        echo(text(comparison), f"\ncurves: {picture}" if drawn else "\nno curves: nothing was logged yet", sep="\n")


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN", help="Directory or name of a run; by default the newest.", autocompletion=complete.runs
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="An .html file; default RUN/report.html.")] = None,
    split: Annotated[
        Literal["val", "test"],
        typer.Option("--split", "--role", help="Which part of the data the figures are made from."),
    ] = "val",
    figures: Annotated[
        bool, typer.Option("--figures/--no-figures", help="Apply the best weights to the data and show the results.")
    ] = True,
    trust: Trust = False,
    diff: Annotated[
        bool, typer.Option("--diff/--no-diff", help="Show the changes of your code that were not committed to git.")
    ] = True,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Write one page about a run: curves, figures, settings, environment, how to reproduce it."""
    import webbrowser

    from isoscale.errors import UserError
    from isoscale.runs.git import changes_in_words
    from isoscale.runs.run import Run
    from isoscale.study.report import write_report

    if runs and len(runs) > 1:
        names = shlex.join(runs)
        raise UserError(f"a report is about one run; to see several side by side: isoscale compare {names}")
    found = Run.find(runs[0] if runs else None, trust=trust)
    target = out or found.path / "report.html"
    write_report(found, target, split if figures else None, diff)
    echo(f"written to {target}")
    changes = (found.record.get("code") or {}).get("diff")
    if diff and changes:
        echo(f"note: it shows {changes_in_words(changes)}; to leave them out: --no-diff", err=True)
    if open_page and not webbrowser.open(target.resolve().as_uri()):
        raise UserError(f"no browser could be started here; open {target.resolve()} in yours")


def reproduce(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN", help="Directory or name of a run; by default the newest.", autocompletion=complete.runs
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of steps; by default up to the run's second log.")
    ] = None,
    trust: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Train the first steps of a run again and compare what it logged.

    Exit code 0: equal. 1: not equal. 2: cannot be done, because the data or a package is not there.
    """
    from isoscale.runs.run import Run
    from isoscale.study.reproduce import reproduce as train_again
    from isoscale.study.reproduce import text

    found = train_again(Run.find(run, trust=trust), steps)
    if as_json:
        print_json(found.as_dict())
    else:
        echo(text(found))
    if not found.equal:
        raise typer.Exit(1)
