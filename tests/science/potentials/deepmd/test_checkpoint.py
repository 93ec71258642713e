"""Checkpoints of DeePMD-kit, which `reference` holds two of, are potentials here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isoscale.errors import UserError
from isoscale.recipe.schema import InitFrom
from isoscale.runs.init_from import start_from
from isoscale.science.atoms.use import calculator
from isoscale.science.potentials.deepmd.checkpoint import potential
from isoscale.science.potentials.model import DeepPotential
from isoscale.science.potentials.se_e2_a import SeE2A
from isoscale.science.potentials.task import Potential
from tests.science.potentials.reference.formula import CASES, CUTOFF, LEARNED, SMOOTH, TYPES, frame
from tests.science.potentials.test_reference import REFERENCE, check, frame_and_labels, reference

Change = Callable[[dict[str, Any]], None]


def path_of(name: str) -> Path:
    """The checkpoint of a case after its training."""
    return REFERENCE / f"{name}.ckpt.pt"


def read(name: str) -> dict[str, Any]:
    """What the file of a case holds."""
    found: dict[str, Any] = torch.load(path_of(name), weights_only=True)
    return found


def said(found: dict[str, Any]) -> dict[str, Any]:
    """The settings of the model in it."""
    params: dict[str, Any] = found["model"]["_extra_state"]["model_params"]
    return params


def fresh(name: str, **changed: Any) -> Potential:
    """A task of the same architecture with other weights."""
    case = CASES[name]
    settings = {"sel": case.sel, "cutoff": CUTOFF, "smooth": SMOOTH, **changed}
    descriptor = SeE2A(widths=case.widths, axis_width=case.axis_width, dt=case.dt, one_side=case.one_side, **settings)
    return Potential(DeepPotential(TYPES, descriptor, case.fitting_widths, case.fitting_dt).double())


@pytest.mark.parametrize("name", LEARNED)
def test_it_says_what_its_own_program_says_with_it(name: str) -> None:
    model, batch = potential(read(name)), frame_and_labels()
    assert model is not None
    with torch.no_grad():
        check(model(batch), batch["places"][0].numpy(), reference()[name]["learned"], within=1e-10)


@pytest.mark.parametrize("name", LEARNED)
def test_a_training_starts_from_it(name: str) -> None:
    task, batch = fresh(name), frame_and_labels()
    start_from(InitFrom(run=str(path_of(name))), task, lambda text: None)
    with torch.no_grad():
        check(task.model(batch), batch["places"][0].numpy(), reference()[name]["learned"], within=1e-10)


def test_it_is_a_calculator(tmp_path: Path) -> None:
    ase = pytest.importorskip("ase")
    elements, made, found = ["O", "H", "C"], frame(), read("pairs_dt")
    said(found).update(type_map=elements)
    torch.save(found, tmp_path / "model.ckpt.pt")
    atoms = ase.Atoms([elements[kind] for kind in made["types"]], made["coord"], cell=made["box"], pbc=True)
    atoms.calc = calculator(tmp_path / "model.ckpt.pt")
    wanted = reference()["pairs_dt"]["learned"]
    assert atoms.get_potential_energy() == pytest.approx(wanted["energy"], abs=1e-9)
    np.testing.assert_allclose(atoms.get_forces(), wanted["force"], rtol=0, atol=1e-10)
    virial = np.array(wanted["virial"])
    stress = -(virial + virial.T) / 2 / atoms.get_volume()
    np.testing.assert_allclose(atoms.get_stress(voigt=False), stress, rtol=0, atol=1e-10)


@pytest.mark.parametrize("found", [{}, [], None, {"model": {}}, {"model": {"a": torch.ones(1)}}, {"a": torch.ones(1)}])
def test_another_file_is_none(found: Any) -> None:
    assert potential(found) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"sel": [40, 40, 40]}, "its descriptor.sel is"),
        ({"cutoff": CUTOFF + 0.1}, rf"its descriptor.cutoff is {CUTOFF}, .*task.model.descriptor.cutoff={CUTOFF}"),
        ({"smooth": SMOOTH + 0.1}, "its descriptor.smooth is"),
    ],
)
def test_a_model_that_sees_otherwise_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=rf"task.init_from: .*plain.ckpt.pt: {words}"):
        start_from(InitFrom(run=str(path_of("plain"))), fresh("plain", **changed), lambda text: None)


def test_a_model_of_another_shape_is_refused_with_the_settings_to_type() -> None:
    with pytest.raises(UserError) as caught:
        start_from(InitFrom(run=str(path_of("plain"))), fresh("pairs_dt"), lambda text: None)
    plain = CASES["plain"]
    assert f"task.model.descriptor.one_side={str(plain.one_side).lower()}" in str(caught.value)
    assert f"task.model.descriptor.dt={str(plain.dt).lower()}" in str(caught.value)
    assert "networks" not in str(caught.value)


def refused(change: Change, words: str) -> None:
    """Whether a checkpoint with a change is refused in these words."""
    found = read("plain")
    change(found)
    with pytest.raises(UserError, match=words):
        potential(found)


def test_what_is_not_known_here_is_refused() -> None:
    refused(lambda found: said(found).update(model_dict={}), "several heads")
    refused(lambda found: said(found)["descriptor"].update(type="dpa2"), "model.descriptor.type is 'dpa2'")
    refused(lambda found: said(found)["fitting_net"].update(activation_function="gelu"), "known here is 'tanh'")
    refused(lambda found: said(found).update(pair_exclude_types=[[0, 1]]), r"model.pair_exclude_types is \[\[0, 1\]\]")
    name = "model.Default.atomic_model.fitting_net.fparam_avg"
    refused(lambda found: found["model"].update({name: torch.zeros(1)}), "not known here: atomic_model.*fparam_avg")
