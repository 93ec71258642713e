"""What a task of crystals learns and measures: means that no cut and no padding changes, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from isoscale.errors import UserError
from isoscale.science.crystals.targets import GPA
from isoscale.science.crystals.task import Crystal
from tests.science.crystals.made_labels import COUNTS, Structures, Told, batch, evaluated, source, structures, training

EVERYTHING: dict[str, Any] = {
    "energy": None, "forces": None, "stress": None, "gap": None, "charges": {"of": "atom"}, "system": {"classes": 3},
    "site": {"of": "atom", "classes": 2},
}  # fmt: skip
WITHOUT = {"energy": [2], "forces": [0, 4], "stress": [1, 3, 5], "charges": [4], "system": [0], "site": [2]}
PENALTIES = {"mse": functional.mse_loss, "mae": functional.l1_loss, "huber": functional.huber_loss}


def task(made: Structures, targets: Any = None, **options: Any) -> Crystal:
    """A task that has measured all structures."""
    found = Crystal(Told(), EVERYTHING if targets is None else targets, **options)
    found.fit_statistics(training(source(made)))
    found.prepare_training(source(made), [])
    return found


def labelled(made: Structures, name: str) -> list[tuple[Tensor, Tensor, int]]:
    """True and predicted values of each structure that has them, and its number of atoms, by plain loops."""
    return [
        (torch.from_numpy(np.asarray(one[name])), torch.from_numpy(np.asarray(one[f"given_{name}"])), len(one["z"]))
        for one in made
        if one.get(f"has_{name}", 1)
    ]


def value(pair: Any) -> float:
    """The mean of a pair."""
    return float(pair.mean.detach())


def joined(made: Structures, name: str) -> tuple[Tensor, Tensor]:
    """All true and predicted values."""
    pairs = labelled(made, name)
    true, found = (torch.cat([pair[side].reshape(-1) for pair in pairs]) for side in (0, 1))
    return true, found


class TestLoss:
    @pytest.mark.parametrize("loss", ["mse", "mae", "huber"])
    @pytest.mark.parametrize("stage", ["train", "val"])
    def test_is_that_of_plain_torch_on_lists(self, loss: str, stage: str) -> None:
        made = structures(without=WITHOUT)
        normalise = {"energy_std": 2.0, "forces_std": 0.5, "stress_std": 0.01, "gap_mean": 1.0, "gap_std": 3.0}
        learning = task(made, loss=loss, delta=0.2, normalise=normalise)
        terms, _ = evaluated(learning, batch(made), stage)
        penalty = PENALTIES[loss]
        options = {"delta": 0.2} if loss == "huber" else {}
        stds = {"forces": 0.5, "stress": 0.01, "gap": 3.0, "charges": 1.0}
        for name, std in stds.items():
            true, found = joined(made, name)
            wanted = penalty(found / std, true / std, **options)
            assert value(terms[name]) == pytest.approx(float(wanted), rel=1e-12), name
        per_atom = [(true / count, found / count) for true, found, count in labelled(made, "energy")]
        true, found = (torch.stack([pair[side] for pair in per_atom]) for side in (0, 1))
        assert value(terms["energy"]) == pytest.approx(float(penalty(found / 2, true / 2, **options)), rel=1e-12)

    @pytest.mark.parametrize("stage", ["train", "val"])
    def test_of_classes_is_cross_entropy(self, stage: str) -> None:
        made = structures(without=WITHOUT)
        terms, shown = evaluated(task(made), batch(made, padding=5), stage)
        for name, pack in (("system", torch.stack), ("site", torch.cat)):
            pairs = labelled(made, name)
            true, scores = pack([pair[0] for pair in pairs]), pack([pair[1] for pair in pairs])
            assert value(terms[name]) == pytest.approx(float(functional.cross_entropy(scores, true)), rel=1e-12)
            right = (scores.argmax(1) == true).double().mean()
            assert shown[f"{name}_accuracy"] == pytest.approx(float(right), rel=1e-12)

    @pytest.mark.parametrize(("per_atom", "power"), [(True, 1.0), ("sqrt", 0.5), (False, 0.0)])
    def test_of_energies_is_divided_by_a_power_of_the_number_of_atoms(self, per_atom: Any, power: float) -> None:
        made = structures()
        learning = task(made, {"energy": {"per_atom": per_atom}}, normalise="none")
        terms, shown = evaluated(learning, batch(made))
        apart = torch.stack([(found - true) / count**power for true, found, count in labelled(made, "energy")])
        assert value(terms["energy"]) == pytest.approx(float(apart.square().mean()), rel=1e-12)
        per_one = torch.stack([(found - true) / count for true, found, count in labelled(made, "energy")])
        assert shown["energy_mae"] == pytest.approx(float(per_one.abs().mean()), rel=1e-12)

    def test_of_forces_may_count_structures_alike(self) -> None:
        made = structures(without={"forces": [1]})
        learning = task(made, {"forces": {"average": "structures"}}, normalise="none")
        for stage in ("train", "val"):
            terms, _ = evaluated(learning, batch(made, padding=3), stage)
            each = [(found - true).square().mean() for true, found, _ in labelled(made, "forces")]
            assert value(terms["forces"]) == pytest.approx(float(torch.stack(each).mean()), rel=1e-12)

    def test_is_learned_alike_however_a_batch_is_cut(self) -> None:
        made = structures(without=WITHOUT)
        learning = task(made)

        def summed(parts: list[Structures], stage: str) -> dict[str, tuple[float, float, float]]:
            found: dict[str, Any] = {}
            for part in parts:
                terms, _ = evaluated(learning, batch(part, padding=len(part)), stage)
                for name, pair in terms.items():
                    slope = torch.autograd.grad(pair.sum, learning.model.factor, retain_graph=True)[0]
                    old = found.get(name, (0.0, 0.0, 0.0))
                    found[name] = old[0] + float(pair.sum.detach()), old[1] + float(pair.weight), old[2] + float(slope)
            return found

        for stage in ("train", "val"):
            whole = summed([made], stage)
            for parts in ([made[:2], made[2:]], [[one] for one in made], [made[4:], made[:1], made[1:4]]):
                for name, values in summed(parts, stage).items():
                    assert values == pytest.approx(whole[name], rel=1e-10), (stage, name)

    def test_without_statistics_is_the_mean_of_the_batch(self) -> None:
        made = structures(without={"forces": [1]})
        terms, _ = evaluated(Crystal(Told(), ["forces"]), batch(made))
        true, found = joined(made, "forces")
        assert value(terms["forces"]) == pytest.approx(float(functional.mse_loss(found, true)), rel=1e-12)

    def test_terms_share_a_weight_so_that_one_backward_pass_serves_all(self) -> None:
        made = structures(without=WITHOUT)
        assert all(isinstance(term, Tensor) for term in task(made).training_step(batch(made), 0).values())

    def test_weighs_labels_of_the_data_at_hand_whatever_weights_are_given(self) -> None:
        """Whoever goes on with a network of large structures on small ones has no other loss than from the start."""
        small, large = structures((2, 3, 2)), structures((30, 40))
        given = task(large, normalise="none").state_dict()
        later = task(small, normalise="none")
        wanted = value(evaluated(later, batch(small))[0]["forces"])
        later.load_state_dict(given)
        later.prepare_training(source(small), [])
        assert value(evaluated(later, batch(small))[0]["forces"]) == wanted

    def test_needs_no_value_on_the_host(self) -> None:
        """What is captured must not ask for one: a fake tensor has none to give."""
        made = structures(without=WITHOUT)
        learning, laid = task(made), batch(made, padding=3)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            terms = learning.training_step({key: mode.from_tensor(tensor) for key, tensor in laid.items()}, 0)
        assert terms.keys() == EVERYTHING.keys()


class TestPadding:
    def test_changes_no_bit_of_the_loss_and_its_gradient_but_for_the_order_of_sums(self) -> None:
        made = structures(without=WITHOUT)
        learning = task(made)
        plain, shown = evaluated(learning, batch(made))
        padded, shown_padded = evaluated(learning, batch(made, padding=37))
        for name, pair in plain.items():
            assert value(padded[name]) == pytest.approx(value(pair), rel=1e-13)
            slopes = [torch.autograd.grad(each.mean, learning.model.factor)[0] for each in (pair, padded[name])]
            assert float(slopes[1]) == pytest.approx(float(slopes[0]), rel=1e-12)
        assert shown_padded == pytest.approx(shown, rel=1e-12)

    def test_weighs_nothing_whatever_is_predicted_for_it(self) -> None:
        made = structures()
        learning, laid = task(made), batch(made, padding=4)
        wanted = value(evaluated(learning, laid)[0]["forces"])
        laid["given_forces"] = laid["given_forces"].clone()
        laid["given_forces"][-4:] = 1e6
        assert value(evaluated(learning, laid)[0]["forces"]) == wanted


class TestMissingLabels:
    def test_of_a_whole_batch_make_a_term_of_nothing_and_no_nan(self) -> None:
        made = structures(without={"forces": range(len(COUNTS))})
        learning = Crystal(Told(), ["energy", "forces"])
        for stage in ("train", "val"):
            terms, _ = evaluated(learning, batch(made), stage)
            assert value(terms["forces"]) == 0
            assert float(torch.autograd.grad(terms["forces"].mean, learning.model.factor)[0]) == 0

    def test_and_batches_without_the_target_keep_its_term(self) -> None:
        made = structures()
        laid = batch(made)
        del laid["stress"]
        terms, shown = evaluated(task(made, ["energy", "stress"]), laid, "val")
        assert value(terms["stress"]) == 0 and not any(name.startswith("stress") for name in shown)


class TestMetrics:
    def test_are_means_over_all_components_in_units_of_the_data(self) -> None:
        made = structures(without=WITHOUT)
        _, shown = evaluated(task(made), batch(made, padding=9), "val")
        for name, unit in (("forces", 1.0), ("stress", GPA), ("gap", 1.0), ("charges", 1.0)):
            true, found = joined(made, name)
            apart = unit * (found - true)
            assert shown[f"{name}_mae"] == pytest.approx(float(apart.abs().mean()), rel=1e-12)
            assert shown[f"{name}_rmse"] == pytest.approx(float(apart.square().mean().sqrt()), rel=1e-12)

    def test_of_energies_keep_all_digits(self) -> None:
        made = structures([4] * 3)
        for one in made:
            one["energy"] = -1e7
            one["given_energy"] = -1e7 + 4e-6
        _, shown = evaluated(task(made, ["energy"], normalise="none"), batch(made), "val")
        assert shown["energy_mae"] == pytest.approx(1e-6, rel=1e-2)
        assert "energy" in Crystal(Told(), ["energy"]).as_stored


class TestRecipe:
    @pytest.mark.parametrize(
        ("targets", "said"),
        [
            (["force"], '"force" is called "forces"'),
            ([], "nothing to learn"),
            ({"energy": {"peratom": True}}, 'did you mean "per_atom"'),
            ({"energy": {"loss": "hubber"}}, 'did you mean "huber"'),
            ({"energy": {"per_atom": "root"}}, "expected true, false or sqrt"),
            ({"forces": {"average": "frames"}}, "expected atoms or structures"),
            ({"forces": {"loss": "huber", "delta": 0}}, "a number above 0"),
            ({"gap": {"of": "site"}}, "expected structure or atom"),
            ({"system": {"classes": 1}}, "at least 2"),
            ({"system": {"classes": 3, "loss": "mse"}}, "unknown option"),
            ({"energy": {"of": "atom"}}, "unknown option"),
            (["cell"], "what the network sees"),
            ({"gap": 3}, "expected options"),
        ],
    )
    def test_mistakes_in_targets_are_told(self, targets: Any, said: str) -> None:
        with pytest.raises(UserError, match=said):
            Crystal(Told(), targets)

    def test_a_loss_for_all_targets_but_those_with_their_own(self) -> None:
        found = Crystal(Told(), {"energy": None, "forces": {"loss": "mae"}}, loss="huber", delta=0.3).targets
        assert [(each.loss, each.delta) for each in found] == [("huber", 0.3), ("mae", 0.3)]


class TestRefused:
    def check(self, made: Any, targets: Any = None, split: str = "train", **options: Any) -> Crystal:
        found = Crystal(Told(), EVERYTHING if targets is None else targets, **options)
        found.check_data(split, made)
        return found

    def test_a_target_that_no_structure_has_with_the_one_that_was_meant(self) -> None:
        made = structures()
        with pytest.raises(UserError, match=r'no structure of the train data has gapp.*did you mean "gap"'):
            self.check(source(made), ["gapp"])
        with pytest.raises(UserError, match="no structure of the val data has forces"):
            self.check(source(made, ["forces"]), ["energy", "forces"], "val")

    def test_a_target_that_is_marked_as_missing_everywhere(self) -> None:
        made = structures(without={"forces": range(len(COUNTS))})
        with pytest.raises(UserError, match="no structure of the train data has forces"):
            self.check(source(made), ["forces"])

    def test_but_not_one_that_some_lack_or_that_a_test_lacks(self) -> None:
        self.check(source(structures(without={"forces": [0, 1]})))
        self.check(source(structures(), ["stress"]), split="test")

    def test_a_test_with_nothing_to_compare(self) -> None:
        with pytest.raises(UserError, match="isoscale predict"):
            self.check(source(structures(), ["energy", "forces"]), ["energy", "forces"], "test")
        self.check(source(structures(), ["energy", "forces"]), ["energy", "forces"], "predict")

    def test_values_of_atoms_that_are_learned_for_structures_and_the_reverse(self) -> None:
        with pytest.raises(UserError, match=r"task\.targets\.charges\.of=atom"):
            self.check(source(structures()), ["charges"])
        with pytest.raises(UserError, match=r"task\.targets\.gap\.of=structure"):
            self.check(source(structures()), {"gap": {"of": "atom"}})

    def test_whole_numbers_that_may_be_classes(self) -> None:
        with pytest.raises(UserError, match=r"task\.targets\.system\.classes=3"):
            self.check(source(structures(COUNTS * 4)), ["system"])

    def test_classes_that_the_model_does_not_have(self) -> None:
        with pytest.raises(UserError, match="2 classes"):
            self.check(source(structures(COUNTS * 4)), {"system": {"classes": 2}})

    def test_values_of_another_shape(self) -> None:
        made = structures()
        for one in made:
            one["gap"] = np.ones(4)
        with pytest.raises(UserError, match=r"task\.targets\.gap\.shape=\[4\]"):
            self.check(source(made), ["gap"])
        self.check(source(made), {"gap": {"shape": 4}})

    def test_a_stress_without_a_cell(self) -> None:
        made = structures()
        made[3]["cell"] = np.zeros((3, 3))
        with pytest.raises(UserError, match=r"made.xyz, frame 3.*no cell"):
            self.check(source(made), ["stress"])
        made = structures(without={"stress": [3]})
        made[3]["cell"] = np.zeros((3, 3))
        self.check(source(made), ["stress"])

    def test_elements_that_the_training_data_does_not_have(self) -> None:
        other = structures(elements=(3, 26), seed=5)
        learning = self.check(source(structures()))
        for split in ("val", "test", "predict"):
            with pytest.raises(UserError, match=r"Fe in \d structures.*frame .*allow_unknown_elements"):
                learning.check_data(split, source(other))
        allowing = self.check(source(structures()), allow_unknown_elements=True)
        allowing.check_data("val", source(other))

    def test_elements_are_remembered_in_the_weights(self) -> None:
        learning = self.check(source(structures()))
        learning.prepare_training(source(structures()), [])
        later = Crystal(Told(), EVERYTHING)
        later.load_state_dict(learning.state_dict())
        with pytest.raises(UserError, match="Fe"):
            later.check_data("test", source(structures(elements=(26,))))
