"""`isoscale scale`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isoscale.cli.arguments import OptionalRecipe, Overrides, sort_out
from isoscale.cli.arguments import Trust as TrustOption
from isoscale.cli.jobs.job_options import JobOptions, Submit
from isoscale.cli.output import print_json
from isoscale.errors import INTERRUPTED, UserError
from isoscale.system import early_stop
from isoscale.system.printing import echo

if TYPE_CHECKING:
    from isoscale.recipe.trust import Trust
    from isoscale.study.scale.job import Request
    from isoscale.study.scale.study import Question, Study

REPEATS = 3


def scale(
    context: typer.Context,
    recipe: OptionalRecipe = None,
    overrides: Overrides = None,
    ranks: Annotated[str | None, typer.Option(metavar="1,2,4", help="Numbers of ranks to measure.")] = None,
    weak: Annotated[
        bool | None,
        typer.Option("--weak/--strong", help="Keep the batch of a rank, or the whole batch; by default the whole."),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="How often to measure everything; by default 3 times.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Steps that are timed; by default as many as take 2 seconds.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", help="Directory of the study; one that is there is shown, and completed."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
    in_job: Submit = False,
    trust: TrustOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --job: print the script of the job, and submit nothing.")
    ] = False,
    measure: Annotated[
        str | None,
        typer.Option(metavar="RANKS:REPEAT", hidden=True, help="Be a rank of one measurement, as in a job's script."),
    ] = None,
) -> None:
    """Measure how much faster training gets on more ranks: the scaling table, with a picture.

    Each number of ranks trains the recipe's first steps, several times in turn, without evaluations and checkpoints.
    """
    from isoscale.recipe.trust import Trust
    from isoscale.study.scale.study import Question

    if measure is not None:
        _be_a_rank(run, measure)
        return
    job: JobOptions = context.obj
    _check_job_options(in_job, ["--dry-run"] * dry_run + job.given)
    if run is not None and (run / "scale.json").exists():
        new = {"RECIPE": recipe, "--ranks": ranks, "--weak or --strong": weak, "--repeats": repeats, "--steps": steps,
               "--job": in_job or None}  # fmt: skip
        _refuse(new, f"is for a new study, and {run} holds one: leave it out to complete that one, or choose another "
                     "directory with --run DIR")  # fmt: skip
        _go_on(run, as_json, trust)
        return
    counts = _counts(ranks)
    recipe, words = sort_out(recipe, overrides)
    question = Question("weak" if weak else "strong", counts, repeats or REPEATS, steps)
    if in_job:
        _measure_in_job(recipe, words, question, run, job, Trust.CHECKED if dry_run else Trust.of(trust), as_json)
    else:
        _measure_here(recipe, words, question, run, as_json, Trust.of(trust))


def _check_job_options(in_job: bool, given: list[str]) -> None:
    if given and not in_job:
        raise UserError(f"{given[0]} is for a job: add --job, or leave it out")
    if "-n" in given:
        raise UserError("-n is not needed: --ranks says how many GPUs, and --gpus-per-node how many a node has")
    if "--max-requeues" in given:
        raise UserError("--max-requeues is for a training that goes on; a job that measures does not start again")


def _refuse(options: dict[str, Any], why: str) -> None:
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise UserError(f"{given[0]} {why}")


def _be_a_rank(run: Path | None, pair: str) -> None:
    """Measure once: as one of the ranks, or by starting them where nobody has."""
    from isoscale.launch.local import launch
    from isoscale.parallel.environments.find import find

    ranks, _, repeat = pair.partition(":")
    if run is None or not ranks.isdigit() or not repeat.isdigit():
        raise UserError("--measure RANKS:REPEAT stands beside --run DIR")
    if find().world == 1 and int(ranks) > 1:
        raise typer.Exit(launch(int(ranks), sys.argv))
    early_stop.listen()
    from isoscale.study.scale.rank import measure

    measure(run, int(ranks), int(repeat))


def _counts(text: str | None) -> list[int]:
    if text is None:
        raise UserError("say which numbers of ranks to measure, such as --ranks 1,2,4")
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) for word in words):
        raise UserError(f"--ranks {text}: write numbers of ranks with commas, such as --ranks 1,2,4")
    return sorted({int(word) for word in words})


def _measure_here(
    recipe: str | None, words: list[str], question: "Question", run: Path | None, as_json: bool, trust: "Trust"
) -> None:
    from isoscale.launch.local import check_alone
    from isoscale.recipe.load import load_recipe
    from isoscale.study.scale import local as scale_local
    from isoscale.study.scale.study import begin, check

    check_alone("scale starts its ranks")
    loaded = load_recipe(recipe, words, check_components=True, trust=trust)
    check(loaded.recipe, question)
    warning = scale_local.warning(loaded.recipe, question.ranks[-1])
    if warning is not None:
        _say(f"warning: {warning}")
    _complete_here(begin(loaded, question, run, scale_local.threads(question.ranks[-1])), as_json)


def _complete_here(study: "Study", as_json: bool) -> None:
    from isoscale.study.scale import local as scale_local

    study, code = scale_local.complete(study, _say)
    if not study.measurements:
        study.remove()  # nothing was earned yet: leave no litter
    else:
        _show(study, as_json)
    if code != 0:
        raise typer.Exit(code)


def _measure_in_job(
    recipe: str | None, words: list[str], question: "Question", run: Path | None, job: JobOptions, trust: "Trust",
    as_json: bool,
) -> None:  # fmt: skip
    from isoscale.launch.submission import is_own_environment, scheduler_of
    from isoscale.recipe.load import load_recipe, to_submit
    from isoscale.recipe.trust import Trust
    from isoscale.study.scale.job import Request
    from isoscale.study.scale.study import begin, check, planned

    of_recipe = load_recipe(recipe, words).recipe
    check(of_recipe, question)
    request = Request.make(of_recipe.launch, job.cluster, job.keys, question.ranks[-1])
    loaded = load_recipe(recipe, words, check_components=is_own_environment(request.launch), trust=trust)
    if trust is Trust.CHECKED:
        planned_job = request.job(planned(loaded, question, run))
        echo(scheduler_of(planned_job).script(planned_job), end="")
        return
    to_submit(loaded, trust)
    _submit_and_wait(begin(loaded, question, run), request, as_json)


def _submit_and_wait(study: "Study", request: "Request", as_json: bool) -> None:
    import shlex

    from isoscale.launch.schedulers.find import find
    from isoscale.study.scale import job as scale_job

    scheduler = find(request.launch.scheduler)
    study = scale_job.submit(study, request)
    assert study.job is not None
    number, path = study.job["id"], shlex.quote(str(study.path))
    try:
        _say(f"submitted job {number}: {request.resources}; waits for it, Ctrl-C leaves it in the queue")
        study = scale_job.wait(study, _say)
    except KeyboardInterrupt:
        end = f"{scheduler.batch.cancel} {number}"
        _say(f"job {number} stays in the queue; the table later: isoscale scale --run {path}; end it: {end}")
        raise typer.Exit(INTERRUPTED) from None
    _show(study, as_json)
    if study.missing:
        raise UserError(
            f"job {number} ended before all was measured; what it wrote is in {study.path / scheduler.name}. Once that "
            f"is repaired, submit the rest: isoscale scale --run {path}"
        )


def _go_on(path: Path, as_json: bool, is_trusted: bool) -> None:
    """Show a study, and measure what is missing where nobody is about to."""
    from isoscale.launch.local import check_alone
    from isoscale.recipe.launch import Launch
    from isoscale.runs.directory import RunDirectory
    from isoscale.study.scale import job as scale_job
    from isoscale.study.scale.study import Study

    study = Study.read(path)
    if is_trusted:
        RunDirectory(path).adopt()
    if not study.missing:
        _show(study, as_json)
    elif study.job is None:
        check_alone("scale starts its ranks")
        _complete_here(study, as_json)
    elif (found := scale_job.standing(study)) is not None and found.is_active:
        _show(study, as_json)
        _say(f"job {study.job['id']} is {found.state}: {found.reason}")
    else:
        if not (study.is_own or is_trusted):
            _refuse_job_of_others(study)
        request = scale_job.Request.of(Launch(**study.job["launch"]), study.ranks[-1])
        _submit_and_wait(study, request, as_json)


def _refuse_job_of_others(study: "Study") -> None:
    """Refuse what a job would do because somebody else has written it."""
    from isoscale.recipe.problems import RecipeError
    from isoscale.recipe.trust import Trust, job_problems

    problems = job_problems(study.job or {}, [str(study.path / "scale.json")], Trust.NAMED)
    if problems:
        raise RecipeError(problems)


def _show(study: "Study", as_json: bool) -> None:
    """Print the table and write the files beside scale.json."""
    from isoscale.observe.text import table
    from isoscale.study.scale import table as scale_table

    written = _write(study) if study.measurements else []
    if as_json:
        print_json(scale_table.as_dict(study))
        return
    echo(scale_table.text(study))
    if written:
        echo("", *table(written), sep="\n")


def _write(study: "Study") -> list[tuple[str, str]]:
    """The files, and what each of them is."""
    from isoscale.study.scale import chart as scale_chart
    from isoscale.study.scale import table as scale_table
    from isoscale.system.files import failures_in_words, write_aside

    texts = {"table": ("md", scale_table.markdown(study)), "numbers": ("csv", scale_table.as_csv(study))}
    found = [("measurements", str(study.path / "scale.json"))]
    for what, (suffix, text) in texts.items():
        path = study.path / f"scale.{suffix}"
        with failures_in_words(path):
            write_aside(path, text)
        found.append((what, str(path)))
    picture = study.path / "scale.png"
    return [*found, *([("picture", str(picture))] if scale_chart.draw(study, picture) else [])]


def _say(line: str) -> None:
    echo(line, err=True)
