"""`isoscale data info` of systems of atoms: what is in them, and how many neighbours their atoms have."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoscale.cli.data_words import split_words
from isoscale.cli.output import print_json
from isoscale.system.printing import echo

if TYPE_CHECKING:
    from isoscale.recipe.schema import Task
    from isoscale.science.potentials.systems import System

DEFAULT_CUTOFF = 6.0
"""Å."""
HDF5 = (".h5", ".hdf5")


def names_systems(name: str) -> bool:
    """Whether a name means systems of atoms in folders or an HDF5 file, rather than other files or a recipe."""
    path = Path(name).expanduser()
    if "#" not in name and not path.is_dir() and not (path.suffix in HDF5 and path.is_file()):
        return False
    from isoscale.recipe.presets import preset_names
    from isoscale.science.potentials.systems import has_systems

    return name not in preset_names() and has_systems(name)


def path_facts(words: list[str]) -> dict[str, Any]:
    """Of systems at paths, with `cutoff=8` among the words for another than usual."""
    from isoscale.errors import UserError
    from isoscale.science.potentials.describe import describe_systems
    from isoscale.science.potentials.systems import find_systems

    paths, options = split_words(words)
    cutoff = options.pop("cutoff", DEFAULT_CUTOFF)
    if options or not isinstance(cutoff, int | float) or cutoff <= 0:
        raise UserError(f"systems of atoms take cutoff=NUMBER, in Å; found {' '.join(words[1:])}")
    systems = {"system": [system for path in paths for system in find_systems(path)]}
    why = "the default; cutoff=8 takes another" if cutoff == DEFAULT_CUTOFF else "as asked for"
    return {"title": ", ".join(paths), **describe_systems(systems, float(cutoff)), "why": why}


def recipe_facts(systems: "Mapping[str, Sequence[System]]", task: "Task") -> dict[str, Any]:
    """Of the systems of a recipe, beside what its model has room for."""
    from isoscale.science.potentials.describe import describe_systems

    model = task.model if isinstance(task.model, Mapping) else {}
    descriptor = model.get("descriptor")
    descriptor = descriptor if isinstance(descriptor, Mapping) else {}
    why = "task.model.descriptor.cutoff" if "cutoff" in descriptor else "the default"
    cutoff = float(descriptor.get("cutoff", DEFAULT_CUTOFF))
    sel = descriptor.get("sel")
    room = list(sel) if isinstance(sel, list) else None
    return {**describe_systems(systems, cutoff, model.get("types"), room), "why": why}


def show(facts: dict[str, Any], as_json: bool) -> None:
    """Print what is known of systems."""
    from isoscale.observe.tables import aligned

    if as_json:
        print_json(facts)
        return
    echo(facts["title"])
    for split, systems in facts["systems"].items():
        lines = aligned([(split, "frames", "atoms", "formula", "periodic", "labels"), *map(_row, systems)], indent="  ")
        echo("\n".join(["", *lines]))
    near = facts["neighbours"]
    has_room = any(each["sel"] is not None for each in near["types"])
    head = ("type", "most", *(["sel"] if has_room else []), "suggested sel")
    rows = [_neighbour_row(each, has_room) for each in near["types"]]
    echo(f"\nneighbours within {near['cutoff']:g} Å ({facts['why']})")
    echo("\n".join(aligned([head, *rows], indent="  ")))
    if near["nearest"] is not None:
        echo(f"  the nearest two atoms are {near['nearest']:.3f} Å apart, in {near['nearest_in']}")
    echo("  suggested: a tenth more than the most that any atom has, rounded up to a multiple of 4")


def _row(system: dict[str, Any]) -> tuple[str, ...]:
    numbers = f"{system['frames']:,}", f"{system['atoms']:,}"
    labels = ", ".join(system["labels"]) or "none"
    return system["name"], *numbers, system["formula"], "yes" if system["periodic"] else "no", labels


def _neighbour_row(found: dict[str, Any], has_room: bool) -> tuple[str, ...]:
    room = "" if found["sel"] is None else str(found["sel"]) + (" too few" if found["sel"] < found["most"] else "")
    return found["name"], str(found["most"]), *([room] if has_room else []), str(found["suggested"])
