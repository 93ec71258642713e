"""`isoscale runs`: what was trained."""

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Look at runs.", no_args_is_help=True)


@app.command("list")
def list_(
    folder: Annotated[Path, typer.Argument(help="The folder of runs.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the runs as JSON.")] = False,
) -> None:
    """List the runs in a folder, oldest first."""
    from isoscale.run import Run

    summaries = [run.summary() for run in Run.all(folder)]
    if as_json:
        import json

        print(json.dumps(summaries))
        return
    if not summaries:
        print(f"no runs in {folder}; start one with `isoscale train`")
        return
    _print_table(summaries)


def _print_table(summaries: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("run", "status", "step", "best", "started"):
        table.add_column(title, justify="right" if title == "step" else "left", no_wrap=title == "run")
    for run in summaries:
        steps = f"{run['step']}/{run['num_steps']}" if run["step"] is not None else ""
        table.add_row(run["path"], run["status"], steps, _best(run), str(run["started"] or "")[:19])
    Console().print(table)


def _best(summary: dict[str, Any]) -> str:
    best = summary["best"]
    return f"{best['name']} {best['value']:.4g}" if best and best["value"] is not None else ""


@app.command("show")
def show(
    run: Annotated[str | None, typer.Argument(help="Directory or name of a run; by default the newest.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Show where a run stands: status, step, metrics, hash of the weights."""
    from isoscale.run import Run

    summary = Run.find(run).summary()
    if as_json:
        import json

        print(json.dumps(summary))
        return
    summary["best"] = _best(summary)
    for name, value in summary.items():
        if isinstance(value, dict):
            for key, entry in value.items():
                print(f"{'':16}{key} {entry:.4g}" if isinstance(entry, float) else f"{'':16}{key} {entry}")
        elif value not in (None, ""):
            print(f"{name:16}{value}")
