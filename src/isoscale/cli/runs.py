"""`isoscale runs`: what was trained."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isoscale.cli import send
from isoscale.cli.apply import RUN
from isoscale.cli.output import print_columns, print_json
from isoscale.system.printing import echo

if TYPE_CHECKING:
    from isoscale.study.sweep.plan import Sweep

app = typer.Typer(help="Look at runs, and send them on.", no_args_is_help=True)
app.command("send")(send.send)

TITLES = ("run", "status", "step", "best", "started")


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
    from isoscale.runs.run import Run

    summary = Run.find(run).summary()
    if as_json:
        print_json(summary)
        return
    _print_summary(summary)


def _print_summary(summary: dict[str, Any]) -> None:
    from isoscale.observe.text import number, plain_number, table

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
