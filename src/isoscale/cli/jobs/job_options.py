"""Options of a job: one for each key of the recipe's `launch` section, in all commands that submit jobs."""

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

PANEL = "Job"
Submit = Annotated[
    bool,
    typer.Option("--job", "--slurm", rich_help_panel=PANEL, help="Submit it as a job, with the options that follow."),
]


@dataclass(frozen=True)
class JobOptions:
    """What a job is asked for on the command line."""

    keys: dict[str, Any]
    """By key of the `launch` section."""
    num_gpus: int | None
    cluster: str | None
    given: list[str]
    """The options that were given, as they were typed."""


class JobCommand(TyperCommand):
    """A command with the options of a job, which it finds in its context.

    The schema is read when such a command is called or asked for its help, and not for every other command.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """The command's own options, and those of the job."""
        return [*super().get_params(ctx), *_parameters()]

    def invoke(self, ctx: Any) -> Any:
        """Call the command, with the options of the job put together in one object."""
        from isoscale.errors import UserError

        found = [(each, ctx.params.pop(each.name)) for each in _parameters()]
        given = [(each, value) for each, value in found if value not in (None, (), [])]
        keys: dict[str, Any] = {each.name: list(value) if isinstance(value, tuple) else value for each, value in given}
        wrong = [pair for pair in keys.get("env", ()) if "=" not in pair]
        if wrong:
            raise UserError(f"--env {wrong[0]}: write a name and a value, such as --env OMP_NUM_THREADS=8")
        keys["env"] = dict(pair.split("=", 1) for pair in keys.get("env", ()))
        num_gpus, cluster = keys.pop("num_gpus", None), keys.pop("cluster", None)
        ctx.obj = JobOptions(keys, num_gpus, cluster, [each.opts[0] for each, _ in given])
        return super().invoke(ctx)


@cache
def _parameters() -> list[Any]:
    from isoscale.recipe.launch import Launch

    options = {
        "num_gpus": _option(int, "-n", metavar="TOTAL", help="GPUs in total, instead of nodes.", min=1),
        "cluster": _option(str, "--cluster", metavar="NAME", help="A profile with values for a cluster."),
    }
    for key, field in Launch.model_json_schema()["properties"].items():
        kinds = [kind for kind in field.get("anyOf", [field]) if kind["type"] != "null"]
        is_number = [kind["type"] for kind in kinds] == ["integer"]
        is_list, is_dict = (kinds[0]["type"] == word for word in ("array", "object"))
        name = f"--{(key.removesuffix('s') if is_list else key).replace('_', '-')}"
        options[key] = _option(
            int if is_number else list[str] if is_list or is_dict else str,
            name,
            metavar="N" if is_number else "KEY=VALUE" if is_dict else name.rpartition("-")[2].upper(),
            help=" ".join(field["description"].replace("`", "").split()) + " May be repeated." * (is_list or is_dict),
            min=kinds[0].get("minimum") if is_number else None,
        )

    def job(**given: Any) -> None: ...

    keyword = inspect.Parameter.KEYWORD_ONLY
    job.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(key, keyword, default=None, annotation=option) for key, option in options.items()]
    )
    job.__annotations__ = options
    app = typer.Typer(add_completion=False)
    app.command()(job)
    return typer.main.get_command(app).params


def _option(kind: Any, *names: str, **about: Any) -> Any:
    return Annotated[kind | None, typer.Option(*names, rich_help_panel=PANEL, **about)]
