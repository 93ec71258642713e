"""What a potential learns and measures: errors per frame, statistics on any ranks, and what it refuses."""

import json
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

import isoscale
from isoscale.engine.metrics.accumulators import Recorder, means
from isoscale.engine.step.context import StepContext
from isoscale.errors import UserError
from isoscale.science.potentials import DeepPotential, Potential, SeE2A
from isoscale.science.potentials.geometry import Edges
from isoscale.science.potentials.statistics import fit_statistics
from tests.helpers import train
from tests.science.potentials.made_systems import CUTOFF, TYPES, Alone, arrays, opened, write
from tests.science.potentials.test_neighbour_cache import Ranks, together


def model(seed: int = 0, sel: tuple[int, int] = (30, 30)) -> DeepPotential:
    torch.manual_seed(seed)
    return DeepPotential(TYPES, SeE2A(list(sel), CUTOFF, widths=[4, 8], axis_width=2), [6, 6]).double()


def evaluated(
    task: Potential, batch: dict[str, Tensor], stage: str = "val"
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The terms of the loss, and what is logged, as people see it."""
    recorder = Recorder(torch.device("cpu"))
    found = StepContext(stage, task, recorder)
    found.enter()
    terms = found.method(batch, 0)
    found.flush(len(batch["energy"]))
    found.leave()
    return terms, recorder.shown(means(recorder.read().pairs()))


def everything(tmp_path: Path, **arguments: Any) -> Any:
    return opened(write(tmp_path / "a", [arrays(4)]), **arguments).train


class TestErrors:
    def test_of_every_label_are_means_over_frames_in_the_units_that_people_read(self, tmp_path: Path) -> None:
        batch = everything(tmp_path).fetch(torch.arange(4))
        task = Potential(model(), ["energy", "force", "virial"])
        terms, shown = evaluated(task, batch)
        with torch.no_grad():
            found = task.model(batch)
        energy, force, virial = (
            (getattr(found, label) - batch[label]).double() for label in ("energy", "force", "virial")
        )
        assert float(terms["energy"]) == pytest.approx(float(energy.square().mean()) / 5)
        assert float(terms["force"]) == pytest.approx(float(force.square().mean()))
        assert float(terms["virial"]) == pytest.approx(float(virial.square().mean()) / 5)
        assert shown["energy_rmse"] == pytest.approx(float(energy.square().mean().sqrt()) / 5)
        assert shown["force_rmse"] == pytest.approx(float(force.square().mean().sqrt()))
        assert shown["force_mae"] == pytest.approx(float(force.abs().mean()))
        assert shown["virial_mae"] == pytest.approx(float(virial.abs().mean()) / 5)

    def test_of_frames_of_any_size_weigh_atoms_alike_where_they_are_shown_and_frames_where_they_are_learned(
        self, tmp_path: Path
    ) -> None:
        large, small = write(tmp_path / "large", [arrays(2)]), write(tmp_path / "small", [arrays(3, (1, 0))], (1, 0))
        mixed = opened(large, small, batches="mixed").train.systems[0]
        task = Potential(model())
        terms, shown = evaluated(task, mixed.fetch(torch.arange(5)))
        apart = [(2, 5, opened(large)), (3, 2, opened(small))]
        each = [(count, atoms, *evaluated(task, data.train.fetch(torch.arange(count)))) for count, atoms, data in apart]
        for label in ("energy", "force"):
            expected = sum(count * float(found[label]) for count, _, found, _ in each) / 5
            assert float(terms[label]) == pytest.approx(expected)
        squares = sum(count * atoms * said["force_rmse"] ** 2 for count, atoms, _, said in each)
        assert shown["force_rmse"] == pytest.approx(math.sqrt(squares / (2 * 5 + 3 * 2)))

    def test_a_label_that_some_systems_lack_is_learned_from_the_others(self, tmp_path: Path) -> None:
        without = arrays(3, seed=1)
        del without["virial"]
        paths = write(tmp_path / "with", [arrays(2)]), write(tmp_path / "without", [without])
        task = Potential(model(), ["energy", "force", "virial"])
        data = opened(*paths).train
        task.check_data("train", data)
        terms, shown = evaluated(task, data.systems[1].fetch(torch.arange(3)))
        assert float(terms["virial"]) == 0 and "virial_rmse" not in shown
        mixed = opened(*paths, batches="mixed").train.systems[0].fetch(torch.arange(5))
        terms, shown = evaluated(task, mixed)
        alone, said = evaluated(task, data.systems[0].fetch(torch.arange(2)))
        assert float(terms["virial"]) == pytest.approx(float(alone["virial"]) * 2 / 5)
        assert shown["virial_rmse"] == pytest.approx(said["virial_rmse"])

    def test_are_logged_in_one_order_whatever_a_system_is_labelled_with(self, tmp_path: Path) -> None:
        """Ranks add up what they logged by its place, and not all of them begin with the same system."""
        without = arrays(2, seed=1)
        del without["virial"]
        data = opened(write(tmp_path / "with", [arrays(2)]), write(tmp_path / "without", [without])).train
        recorded = []
        for system in data.systems:
            task, recorder = Potential(model(), ["energy", "force", "virial"]), Recorder(torch.device("cpu"))
            context = StepContext("val", task, recorder)
            context.enter()
            task.validation_step(system.fetch(torch.arange(2)), 0)
            context.flush(2)
            recorded.append(recorder.recorded)
        assert recorded[0] == recorded[1]

    def test_atoms_may_have_energies_of_their_own(self, tmp_path: Path) -> None:
        labelled = arrays(2)
        labelled["atom_ener"] = np.arange(10.0).reshape(2, 5)
        batch = opened(write(tmp_path / "a", [labelled])).train.fetch(torch.arange(2))
        task = Potential(model(), ["atom_energy"])
        terms, shown = evaluated(task, batch)
        with torch.no_grad():
            apart = task.model(batch).atom_energy - batch["atom_energy"]
        assert float(terms["atom_energy"]) == pytest.approx(float(apart.square().mean()))
        assert shown["atom_energy_rmse"] == pytest.approx(float(apart.square().mean().sqrt()))

    def test_what_is_prepared_once_has_the_bits_of_every_step(self, tmp_path: Path) -> None:
        batch = everything(tmp_path).fetch(torch.arange(4))
        task = Potential(model(), ["energy", "force", "virial"])
        alone = [
            task.precompute({key: value[number : number + 1] for key, value in batch.items()}) for number in range(4)
        ]
        prepared = {key: torch.cat([each[key] for each in alone]) for key in alone[0]}
        assert "coord" not in prepared
        stored, kept = (evaluated(task, each, "train")[0] for each in (batch, prepared))
        assert all(torch.equal(stored[label], kept[label]) for label in task.labels)


class TestStatistics:
    def test_are_those_of_all_slots_of_all_atoms(self, tmp_path: Path) -> None:
        source, found = everything(tmp_path), model()
        fit_statistics(found, training(source), 4, None)
        batch = source.fetch(torch.arange(4))
        edges, descriptor = Edges.of(batch, 2, CUTOFF), found.descriptor
        assert isinstance(descriptor, SeE2A)
        near, direction = descriptor._raw(edges.vectors)
        for kind, places in enumerate(edges.layout.of_atoms):
            missing = 4 * edges.layout.atoms[kind] * (60 - sum(edges.layout.slots))
            ones = torch.cat([near[:, places].reshape(-1), torch.zeros(missing, dtype=torch.float64)])
            three = torch.cat([direction[:, places].reshape(-1), torch.zeros(3 * missing, dtype=torch.float64)])
            assert float(descriptor.mean[kind]) == pytest.approx(float(ones.mean()))
            assert float(descriptor.scale[kind, 0]) == pytest.approx(float(ones.std(correction=0)))
            assert float(descriptor.scale[kind, 1]) == pytest.approx(float(three.square().mean().sqrt()))

    def test_energies_of_lone_atoms_are_the_smallest_that_explain_the_frames(self, tmp_path: Path) -> None:
        source, found = everything(tmp_path), model()
        fit_statistics(found, training(source), 4, None)
        mean = float(source.fetch(torch.arange(4))["energy"].mean())
        assert found.energy_bias.tolist() == pytest.approx([mean * 2 / 13, mean * 3 / 13])

    @pytest.mark.parametrize("world", [2, 3])
    def test_do_not_tell_how_many_ranks_measured_them(self, tmp_path: Path, world: int) -> None:
        source = opened(*(write(tmp_path / name, [arrays(11, seed=len(name))]) for name in ("a", "bb", "ccc"))).train

        def work(ranks: Ranks) -> dict[str, Tensor]:
            found = model()
            fit_statistics(found, training(source, ranks), 10, None)
            return dict(found.named_buffers())

        alone = model()
        fit_statistics(alone, training(source), 10, None)
        for each in together(world, work):
            assert all(torch.equal(value, each[name]) for name, value in alone.named_buffers())

    def test_are_kept_in_a_file_for_others(self, tmp_path: Path) -> None:
        source, path, said = everything(tmp_path), tmp_path / "new" / "statistics.hdf5", []
        first = model()
        fit_statistics(first, training(source, said=said), 4, path)
        with h5py.File(path, "r+") as file:
            file["energy_bias"][:] = 7.0
        again = model()
        fit_statistics(again, training(source, said=said), 4, path)
        assert again.energy_bias.tolist() == [7.0, 7.0] and not said
        fit_statistics(again, training(source, said=said), 3, path)
        assert again.energy_bias.tolist() != [7.0, 7.0] and "measured anew" in said[0]

    def test_may_be_written_by_several_runs_at_the_same_time(self, tmp_path: Path) -> None:
        source, path = everything(tmp_path), tmp_path / "statistics.hdf5"
        barrier, said = threading.Barrier(4), list[str]()

        def work() -> None:
            found = model()
            barrier.wait()
            fit_statistics(found, training(source, said=said), 4, path)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not said and [each.name for each in tmp_path.glob("*statistics*")] == [path.name]
        alone = model()
        fit_statistics(alone, training(source), 4, None)
        with h5py.File(path) as file:
            assert set(file) == {"descriptor.mean", "descriptor.scale", "energy_bias"}
            assert all(np.array_equal(file[name], dict(alone.named_buffers())[name]) for name in file)

    def test_of_another_program_are_left_alone(self, tmp_path: Path) -> None:
        path, said = tmp_path / "statistics.hdf5", []
        with h5py.File(path, "w") as file:
            file["O H/r_0"] = 1.0
        before = path.read_bytes()
        fit_statistics(model(), training(everything(tmp_path), said=said), 4, path)
        assert path.read_bytes() == before and "another program" in said[0]
        path.write_text("no such file")
        with pytest.raises(UserError, match="cannot read"):
            fit_statistics(model(), training(everything(tmp_path), said=said), 4, path)
        (tmp_path / "statistics" / "O H").mkdir(parents=True)
        fit_statistics(model(), training(everything(tmp_path), said=said), 4, tmp_path / "statistics")
        assert "another program" in said[-1]

    def test_in_a_file_are_not_those_of_atoms_that_have_become_others(self, tmp_path: Path) -> None:
        source, path, said = opened(write(tmp_path / "a", types=(0, 0, 1, 1, 1))), tmp_path / "statistics.hdf5", []
        fit_statistics(model(), training(source.train, said=said), 3, path)
        source = opened(write(tmp_path / "a", types=(0, 1, 1, 1, 1)))
        fit_statistics(model(), training(source.train, said=said), 3, path)
        assert "measured anew" in said[0]


def training(source: Any, ranks: Any = None, said: list[str] | None = None) -> Any:
    return SimpleNamespace(source=source, ranks=ranks or Alone(), say=print if said is None else said.append)


def test_a_learning_curve_has_columns_for_what_is_learned() -> None:
    assert list(Potential(model()).curve_columns) == ["rmse", "rmse_e", "rmse_f"]
    assert list(Potential(model(), ["virial", "energy", "atom_energy"]).curve_columns) == ["rmse", "rmse_e", "rmse_v"]


class TestWhatIsRefused:
    def test_more_neighbours_than_sel_are_counted_and_named(self, tmp_path: Path) -> None:
        source = everything(tmp_path)
        with pytest.raises(
            UserError, match=r"a, frame \d.*neighbours of type \w within 2.5 Å, but sel allows 2"
        ) as error:
            Potential(model(sel=(30, 2))).check_data("train", source)
        assert "allow_more_neighbours=true" in str(error.value) and "use a sel of at least" in str(error.value)
        with pytest.raises(UserError, match="train another, with a sel of at least"):
            Potential(model(sel=(30, 2))).check_data("predict", source)
        Potential(model(sel=(30, 2)), allow_more_neighbours=True).check_data("train", source)

    @pytest.mark.parametrize("label", ["energy", "force"])
    def test_a_system_without_a_label_that_is_learned(self, tmp_path: Path, label: str) -> None:
        lacking = arrays(3)
        del lacking[label]
        source = opened(write(tmp_path / "whole"), write(tmp_path / "lacking", [lacking])).train
        with pytest.raises(UserError, match=rf"lacking \(val\) has no {label}.npy"):
            Potential(model()).check_data("val", source)
        others = [each for each in ("energy", "force") if each != label]
        Potential(model(), others).check_data("val", source)

    def test_a_system_without_any_label_in_a_test(self, tmp_path: Path) -> None:
        bare = {key: values for key, values in arrays(3).items() if key in ("coord", "box")}
        source = opened(write(tmp_path / "whole"), write(tmp_path / "bare", [bare])).train
        with pytest.raises(UserError, match=r"bare \(test\) has no labels .* isoscale predict"):
            Potential(model()).check_data("test", source)
        Potential(model()).check_data("predict", source)

    def test_a_virial_that_nobody_has(self, tmp_path: Path) -> None:
        lacking = arrays(3)
        del lacking["virial"]
        with pytest.raises(UserError, match=r"no virial\.npy"):
            Potential(model(), ["force", "virial"]).check_data("train", opened(write(tmp_path / "a", [lacking])).train)

    def test_labels_and_data_that_are_none(self) -> None:
        with pytest.raises(UserError, match="'forces' is not one of energy, force"):
            Potential(model(), ["forces"])
        with pytest.raises(UserError, match="must not be empty"):
            Potential(model(), [])
        with pytest.raises(UserError, match=r"data\.class=atomic_systems"):
            Potential(model()).adapt(isoscale.Sources(train={"x": torch.zeros(3)}), Alone(), print)


def recipe(folder: Path, **task: Any) -> dict[str, Any]:
    write(folder / "a", [arrays(4), arrays(3, seed=1)])
    write(folder / "b", [arrays(5, (1, 0, 1), seed=2)], (1, 0, 1))
    descriptor = {"class": "se_e2_a", "sel": [30, 30], "cutoff": CUTOFF, "widths": [4, 8], "axis_width": 2}
    model = {"class": "deep_potential", "types": TYPES, "descriptor": descriptor, "fitting_widths": [6]}
    return {
        "task": {"class": "potential", "model": model, **task},
        "data": {"class": "atomic_systems", "train": [str(folder / "a"), str(folder / "b")], "val": [str(folder / "b")],
                 "test": [str(folder / "a")]},
        "train": {"steps": 6, "epochs": None, "evaluate": "3 steps", "precision": "64", "threads": 1},
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("batches", ["system", "mixed"])
@pytest.mark.parametrize("batch_size", [1, 3, "auto:6"])
def test_systems_of_different_sizes_are_trained_together(tmp_path: Path, batches: str, batch_size: Any) -> None:
    run = train(tmp_path / "run", recipe(tmp_path), data__batches=batches, data__batch_size=batch_size)
    assert {"val/force_rmse", "val/force_mae", "train/energy_rmse", "val/energy_mae"} <= run.metrics.keys()
    assert isoscale.test(run)["test/force_rmse"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "tolerance"), [("32", 1e-5), ("bf16", 1e-2), ("64", 0)])
def test_a_run_learns_in_any_precision(tmp_path: Path, precision: str, tolerance: float) -> None:
    long = {"train__steps": 20, "train__evaluate": "5 steps", "optimizer__lr": 0.01, "data__batch_size": 4}
    made = recipe(tmp_path)
    run, exact = train(tmp_path / "run", made, train__precision=precision, **long), train(tmp_path / "64", made, **long)
    losses, wanted = ([value for _, value in each.history("val/loss")] for each in (run, exact))
    assert losses == pytest.approx(wanted, rel=tolerance) and (losses != wanted or precision == "64")
    assert wanted[-1] < 0.99 * wanted[0]
    weights = {str(parameter.dtype) for parameter in run.model().parameters()}
    assert weights == {"torch.float64" if precision == "64" else "torch.float32"}
    assert run.model().energy_bias.dtype == torch.float64


def test_all_labels_are_learned_with_weights_that_follow_the_learning_rate(tmp_path: Path) -> None:
    made = recipe(tmp_path, labels=["energy", "force", "virial"])
    weights = {"virial": {"start": 0.1, "end": 10, "follows": "rate"}, "force": 1000.0}
    run = train(tmp_path / "run", made, train__loss_weights=weights, data__batch_size=2, observe__every=1,
                schedule={"name": "exponential", "end": 1e-5, "every": 2})  # fmt: skip
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    said = {(line["step"], line["name"]): line["value"] for line in lines}
    for step in range(1, 7):
        share = said[step, "lr"] / 1e-3
        expected = (
            said[step, "train/energy"] + 1000 * said[step, "train/force"]
            + (10 + (0.1 - 10) * share) * said[step, "train/virial"]
        )  # fmt: skip
        assert said[step, "train/loss"] == pytest.approx(expected, rel=1e-5)


def test_predictions_are_in_the_order_of_the_stored_atoms(tmp_path: Path) -> None:
    run = train(tmp_path / "run", recipe(tmp_path), data__batch_size=2)
    task = run.task()
    batch = opened(tmp_path / "a").train.fetch(torch.tensor([2]))
    found = task.predict_step(batch, 0)
    order = batch["places"][0].long()
    assert torch.equal(found["force"][0][order], task.model(batch).force[0])
