"""`isoscale data shuffle` and `isoscale data make`: new files out of others."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isoscale.cli.data.words import progress, split_words
from isoscale.science.registry import generators
from isoscale.system.printing import echo

if TYPE_CHECKING:
    from isoscale.data.tools.convert import Made, Making


def shuffle(
    patterns: Annotated[
        list[str],
        typer.Argument(metavar="PATTERN", help='A pattern for each column, in quotes: "Be_snapshot*.in.npy".'),
    ],
    out: Annotated[
        str,
        typer.Option("--out", metavar="PATTERN", help='Names of the new files: "Be_shuffled*" gives Be_shuffled0, …'),
    ],
    files: Annotated[
        int | None, typer.Option("--files", metavar="N", min=1, help="How many; by default as many as there were.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="S", help="Another seed, another order.")] = 0,
    memory: Annotated[
        str,
        typer.Option("--memory", metavar="SIZE", help="Memory for rows; the more, the faster. Never changes a byte."),
    ] = "1GB",
    sample_dims: Annotated[
        int,
        typer.Option("--sample-dims", metavar="N", min=0, help="How many dimensions, the last ones, make one sample."),
    ] = 1,
) -> None:
    """Shuffle the rows of .npy files into new files: all columns alike, every row once; goes on if it was killed."""
    from isoscale.data.tools.shuffle import shuffle_files

    with progress() as report:
        written = shuffle_files(
            patterns, out, files, seed, memory, sample_dims, lambda done, total: report("shuffling", done, total)
        )
    echo(f"{len(written)} shuffled files: {written[0]} to {written[-1]}")


def make(
    converter: Annotated[
        str,
        typer.Argument(
            metavar="CONVERTER",
            help=f"text, npz, hdf5, or a function of yours: my_module:read. Of nothing: {', '.join(generators())}.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the new files are written.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="INPUT", help="Files or patterns, and KEY=VALUE for arguments of the converter."),
    ] = None,
    format_name: Annotated[str, typer.Option("--format", metavar="NAME", help="npy, hdf5 or zarr.")] = "npy",
) -> None:
    """Make data files out of others, row by row; what was made already is left alone."""
    from isoscale.data.files import find_files
    from isoscale.data.tools.convert import MANIFEST, make_files
    from isoscale.errors import UserError

    patterns, arguments = split_words(words or [])
    if converter in generators():
        _generate(converter, patterns, arguments, out, format_name)
        return
    if not patterns:
        raise UserError(f"{converter} makes files of others: name them, as in isoscale data make {converter} FILE…")
    making = _making(converter, arguments, format_name)
    inputs = find_files(patterns, ())
    made = list(_told(make_files(inputs, out, making)))
    echo(f"all {sum(made):,} rows are in {out}; {out / MANIFEST} says what was made of what")


def _generate(name: str, patterns: list[str], arguments: dict[str, Any], out: Path, format_name: str) -> None:
    """Make data that depends on its arguments alone."""
    from isoscale.errors import UserError
    from isoscale.recipe.arguments import check_arguments
    from isoscale.recipe.components import resolve
    from isoscale.recipe.problems import RecipeError

    if patterns or format_name != "npy":
        given = patterns[0] if patterns else f"--format {format_name}"
        raise UserError(f"{name} is made of nothing but KEY=VALUE, as files of its own kind: leave {given} out")
    generator = resolve(generators()[name])
    problems = check_arguments(generator, arguments, (), frozenset({"folder", "report"}))
    if problems:
        raise RecipeError(problems)
    with progress() as report:
        made = generator(out, report, **arguments)
    echo("\n".join(made))


def _told(made: Iterator["Made"]) -> Iterator[int]:
    for one in made:
        echo(f"{one.source}: {one.num_rows:,} rows" + ("" if one.is_new else ", made already"))
        yield one.num_rows


def _making(converter: str, arguments: dict[str, Any], format_name: str) -> "Making":
    """The converter by its name, with arguments that it takes."""
    import inspect

    from isoscale.data.formats.writing import WRITERS
    from isoscale.data.tools.convert import Making
    from isoscale.errors import UserError
    from isoscale.recipe.arguments import check_arguments
    from isoscale.recipe.components import resolve
    from isoscale.recipe.names import CONVERTERS
    from isoscale.recipe.problems import RecipeError

    if format_name not in WRITERS:
        raise UserError(f"--format {format_name}: expected one of {', '.join(WRITERS)}")
    target = resolve(CONVERTERS.get(converter, converter))
    first = [] if isinstance(target, type) else list(inspect.signature(target).parameters)[:1]
    problems = check_arguments(target, arguments, (), frozenset(first))
    if problems:
        raise RecipeError(problems)
    return Making(target, converter, arguments, format_name)
