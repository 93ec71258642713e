"""Units of targets: given or fitted, the same on all ranks, and gone from everything that people see."""

from typing import Any

import numpy as np
import pytest
import torch

from isoscale.data.sources import Subset
from isoscale.errors import UserError
from isoscale.science.crystals.labels import Labels
from isoscale.science.crystals.normalise import Normalisation, Unit
from isoscale.science.crystals.targets import learned
from tests.science.crystals.made_labels import COUNTS, Structures, source, structures, training

REFERENCES = {3: -1.5, 15: -4.0, 16: -2.25}


def fitted(made: Any, targets: Any, given: Any = "auto", said: list[str] | None = None) -> dict[str, Unit]:
    """The units of targets."""
    return Normalisation(given, learned(targets, "mse", 1.0)).fit(training(made, said))


def additive(counts: tuple[int, ...] = COUNTS * 3, noise: float = 0.0) -> Structures:
    """Structures whose energy is that of their atoms, and something more."""
    made = structures(counts)
    random = np.random.default_rng(1)
    for one in made:
        energies = [REFERENCES[number] + noise * random.normal() for number in one["z"].tolist()]
        one["energy"] = sum(energies)
    return made


class TestFitted:
    def test_references_are_found_again(self) -> None:
        unit = fitted(source(additive()), ["energy"])["energy"]
        for number, energy in REFERENCES.items():
            assert unit.mean[number] == pytest.approx(energy, abs=1e-9)
        assert np.count_nonzero(unit.mean) == 3

    def test_references_are_least_squares_of_energies_per_atom(self) -> None:
        made = additive(noise=0.3)
        unit = fitted(source(made), ["energy"])["energy"]
        shares = np.array([[np.mean(one["z"] == number) for number in REFERENCES] for one in made])
        per_atom = np.array([one["energy"] / len(one["z"]) for one in made])
        wanted = np.linalg.lstsq(shares, per_atom, rcond=None)[0]
        np.testing.assert_allclose(unit.mean[list(REFERENCES)], wanted, atol=1e-10)
        left = per_atom - shares @ wanted
        assert unit.std == unit.scale == pytest.approx(float(np.sqrt(np.mean(left**2))), rel=1e-9)

    def test_many_structures_are_looked_at_in_blocks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = source(additive(noise=0.3))
        whole = fitted(made, ["energy"])["energy"]
        monkeypatch.setattr("isoscale.science.crystals.labels.BLOCK", 4)
        np.testing.assert_allclose(fitted(made, ["energy"])["energy"].mean, whole.mean, atol=1e-10)

    def test_one_composition_alone_has_the_smallest_references_that_explain_it(self) -> None:
        made = structures([3] * 5)
        for one in made:
            one["z"] = np.array([3, 3, 16])
            one["energy"] = -9.0
        mean = fitted(source(made), ["energy"])["energy"].mean
        assert 2 * mean[3] + mean[16] == pytest.approx(-9.0)
        assert mean[3] == pytest.approx(2 * mean[16])

    def test_forces_and_energies_share_the_size_of_forces(self) -> None:
        made = structures(without={"forces": [2]})
        units = fitted(source(made), ["energy", "forces", "stress"])
        forces = np.concatenate([one["forces"] for number, one in enumerate(made) if number != 2])
        rms = float(np.sqrt(np.mean(forces**2)))
        assert units["energy"].scale == units["energy"].std == units["forces"].std == pytest.approx(rms, rel=1e-12)
        stress = np.stack([one["stress"] for one in made])
        assert units["stress"].std == pytest.approx(float(np.sqrt(np.mean(stress**2))), rel=1e-12)

    def test_forces_alone_scale_the_energy_that_they_are_slopes_of(self) -> None:
        units = fitted(source(structures()), ["forces"])
        assert units["energy"].scale == units["forces"].std and not units["energy"].mean.any()

    def test_properties_have_a_mean_and_a_std_of_those_that_have_them(self) -> None:
        made = structures(without={"gap": [0, 3]})
        unit = fitted(source(made), ["gap"])["gap"]
        values = np.array([one["gap"] for number, one in enumerate(made) if number not in (0, 3)])
        assert (float(unit.mean), unit.std) == pytest.approx((values.mean(), values.std()), rel=1e-12)

    def test_values_of_atoms_have_a_mean_for_each_element(self) -> None:
        made = structures(without={"charges": [4]})
        unit = fitted(source(made), {"charges": {"of": "atom"}})["charges"]
        kept = [one for number, one in enumerate(made) if number != 4]
        z, charges = (np.concatenate([one[key] for one in kept]) for key in ("z", "charges"))
        for number in np.unique(z):
            assert unit.mean[number] == pytest.approx(charges[z == number].mean(), rel=1e-12)
        assert unit.std == pytest.approx(float(np.sqrt(np.mean((charges - unit.mean[z]) ** 2))), rel=1e-12)

    def test_what_does_not_vary_is_not_divided_by_nothing(self) -> None:
        made = structures()
        for one in made:
            one["gap"], one["forces"], one["energy"] = 1.5, np.zeros_like(one["forces"]), 0.0
        units = fitted(source(made), ["gap", "energy", "forces"])
        assert [units[name].std for name in ("gap", "energy", "forces")] == [1, 1, 1]

    def test_a_part_of_a_source_is_fitted_like_the_part_alone(self) -> None:
        made = structures(COUNTS * 2, without={"forces": [1], "charges": [7]})
        chosen = [7, 2, 2, 9, 1]
        targets = {"energy": None, "forces": None, "gap": None, "charges": {"of": "atom"}}
        part = fitted(Subset(source(made), torch.tensor(chosen)), targets)
        alone = fitted(source([made[number] for number in chosen]), targets)
        for name, unit in alone.items():
            np.testing.assert_allclose(part[name].mean, unit.mean, atol=1e-12)
            assert part[name][1:] == pytest.approx(unit[1:], rel=1e-12)

    def test_any_source_that_can_be_fetched_from_is_fitted(self) -> None:
        class Plain:
            def __init__(self) -> None:
                self.inner = source(structures())

            def __len__(self) -> int:
                return len(self.inner)

            def fetch(self, indices: torch.Tensor) -> dict[str, torch.Tensor]:
                return self.inner.fetch(indices)

        targets = {"energy": None, "forces": None, "charges": {"of": "atom"}}
        plain, ragged = fitted(Plain(), targets), fitted(source(structures()), targets)
        for name, unit in ragged.items():
            np.testing.assert_allclose(plain[name].mean, unit.mean, atol=1e-12)
        assert Labels(Plain()).per_atom("charges") and not Labels(Plain()).per_atom("gap")

    def test_a_label_that_is_not_a_number_is_named(self) -> None:
        made = structures()
        made[4]["forces"][2, 1] = np.nan
        with pytest.raises(UserError, match=r"made.xyz, frame 4: forces is not a finite number"):
            fitted(source(made), ["energy", "forces"])

    def test_is_said_in_one_line(self) -> None:
        said: list[str] = []
        fitted(source(additive()), ["energy", "forces"], said=said)
        assert len(said) == 1 and "Li -1.5" in said[0] and "P -4" in said[0]

    def test_the_first_rank_decides_for_all(self) -> None:
        made = training(source(structures()))
        wanted = Normalisation("auto", learned(["energy"], "mse", 1.0)).fit(made)
        sent: list[Any] = []

        class Second:
            rank, world_size = 1, 2

            def all_gather(self, value: Any, what: str) -> list[Any]:
                sent.append(value)
                return [({"energy": wanted["energy"]}, ""), value]

        made.ranks, made.source = Second(), None
        found = Normalisation("auto", learned(["energy"], "mse", 1.0)).fit(made)
        assert sent == [None] and found["energy"].std == wanted["energy"].std


class TestGiven:
    def test_numbers_are_taken_as_they_are(self) -> None:
        given = {"energy_mean": -3.5, "energy_std": 2.0, "forces_std": 0.25, "gap_mean": 1.0, "gap_std": 4.0}
        units = fitted(source(structures()), ["energy", "forces", "gap"], given)
        assert units["energy"].mean[16] == -3.5 and units["energy"].mean[0] == 0
        assert (units["energy"].scale, units["forces"].std) == (2.0, 0.25)
        assert (float(units["gap"].mean), units["gap"].scale) == (1.0, 4.0)

    def test_forces_follow_the_energy_where_they_are_not_named(self) -> None:
        units = fitted(source(structures()), ["energy", "forces"], {"energy_std": 2.0})
        assert units["forces"].std == 2.0

    def test_what_is_not_named_stays_as_it_is_stored(self) -> None:
        units = fitted(source(structures()), ["energy", "forces", "gap"], {"gap_std": 2.0})
        assert [units[name].std for name in ("energy", "forces", "gap")] == [1, 1, 2]
        nothing = fitted(source(structures()), ["energy", "gap"], "none")
        assert not nothing["energy"].mean.any() and nothing["gap"][:3] == (0, 1, 1)

    def test_references_may_be_given_by_element_and_single_numbers_fitted(self) -> None:
        given = {"energy_mean": {"Li": -1.0, "S": -2.0}, "energy_std": "auto"}
        unit = fitted(source(additive()), ["energy"], given)["energy"]
        assert (unit.mean[3], unit.mean[15], unit.mean[16]) == (-1, 0, -2) and unit.std not in (0, 1)

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"enrgy_mean": 1}, 'did you mean "energy_mean"'),
            ({"force_std": 1}, 'did you mean "forces_std"'),
            ({"bandgap_std": 1}, "no target that is learned is called"),
            ({"forces_mean": 0}, "slopes of the energy"),
            ({"system_std": 1}, "no units"),
            ({"energy_std": 0}, "above 0"),
            ({"energy_std": "atuo"}, "expected a number or auto"),
            ({"gap_mean": {"Li": 1}}, "expected a number or auto"),
            ({"energy_mean": {"Lithium": 1}}, "no element"),
            ("automatic", "expected auto, none, or numbers"),
        ],
    )
    def test_mistakes_are_told(self, given: Any, said: str) -> None:
        targets = {"energy": None, "forces": None, "gap": None, "system": {"classes": 3}}
        with pytest.raises(UserError, match=said):
            Normalisation(given, learned(targets, "mse", 1.0))
