"""Inputs of DeePMD-kit 3.2.0 in the place of recipes: every key, paths, overrides, and any number of workers."""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import isoscale
from isoscale.cli.recipe.recipe import app
from isoscale.data.mixture import Mixture, system_batch_sizes
from isoscale.engine.optim.schedules import LearningRate
from isoscale.errors import UserError
from isoscale.recipe.load import load_recipe, load_variants
from isoscale.recipe.loaded import LoadedRecipe
from isoscale.recipe.problems import RecipeError
from isoscale.science.potentials.deepmd.tables import ALIASES, DEFAULTS, NEEDLESS, ONLY
from tests.helpers import QUIET, cli
from tests.science.potentials.deepmd.made_input import changed, write, write_systems

PAGE = Path(__file__).parents[4] / "docs/how-to/coming-from/deepmd.md"
ELSEWHERE = {"model.model_dict", "training.num_epoch_dict", "nvnmd"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ISOSCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path


def loaded(world: int = 1, overrides: Any = (), **changes: Any) -> LoadedRecipe:
    return load_recipe(write(Path.cwd(), **changes), overrides, world=world)


def at(values: Any, path: str) -> Any:
    """A part of a recipe."""
    for key in path.split("."):
        values = values[key] if isinstance(values, dict) else getattr(values, key)
    return values


def wrong(**changes: Any) -> str:
    """What is said about an input that cannot be trained."""
    with pytest.raises(RecipeError) as caught:
        loaded(**changes)
    return str(caught.value)


class TestTheExamples:
    """The three inputs that come with DeePMD-kit for water."""

    @pytest.fixture
    def water(self, shared, folder):
        (folder / "data").symlink_to(shared / "data/potentials/water")
        (folder / "se_e2_a").mkdir()
        for path in (shared / "data/potentials").glob("*.json"):
            (folder / "se_e2_a" / path.name).write_bytes(path.read_bytes())
        return folder / "se_e2_a"

    @pytest.mark.parametrize("name", ["input", "input_torch", "input_torch_num_epoch"])
    def test_an_example_is_a_recipe(self, water, name):
        found = load_recipe(water / f"{name}.json")
        assert found.name == name
        assert found.recipe.seed == 10
        assert found.values["task"]["model"] == {
            "class": "deep_potential", "types": ["O", "H"], "fitting_widths": [240, 240, 240], "fitting_dt": True,
            "descriptor": {
                "class": "se_e2_a", "sel": [46, 92], "cutoff": 6.0, "smooth": 0.5, "widths": [25, 50, 100],
                "axis_width": 16, "dt": False, "one_side": True,
            },
        }  # fmt: skip
        assert found.values["data"]["train"] == [str(water.parent / f"data/data_{number}") for number in range(3)]
        assert found.values["data"]["val"] == [str(water.parent / "data/data_3")]
        assert found.values["data"]["probabilities"] == "size"
        assert (found.recipe.schedule.end, found.recipe.schedule.every) == (3.51e-8, 5000)
        weights = {
            name: weight.model_dump(exclude_defaults=True) for name, weight in found.recipe.train.loss_weights.items()
        }
        assert weights["energy"] == {"start": 0.02, "end": 1, "follows": "rate"}
        assert weights["force"] == {"start": 1000, "end": 1, "follows": "rate"}
        assert found.recipe.train.precision == "64"
        assert found.recipe.observe.curve == "lcurve.out"

    def test_they_differ_in_length_batch_and_statistics(self, water):
        first, torch, epochs = (
            load_recipe(water / f"input{name}.json").recipe for name in ("", "_torch", "_torch_num_epoch")
        )
        assert [(each.train.steps, each.train.epochs) for each in (first, torch, epochs)] == [
            (1000000, None), (100000, None), (None, 100)
        ]  # fmt: skip
        assert [each.data.batch_size for each in (first, torch, epochs)] == ["auto", 1, 1]
        assert [each.task.arguments["statistics_frames"] for each in (first, torch, epochs)] == [10, 20, 20]
        assert "statistics_file" not in first.task.arguments
        assert torch.task.arguments["statistics_file"].endswith("/se_e2_a.hdf5")

    def test_the_preset_is_the_same_training(self, water, monkeypatch):
        monkeypatch.chdir(water.parent)
        (water.parent / "water").symlink_to(water.parent / "data")
        wanted, found = load_recipe(water / "input_torch.json").values, load_recipe("potentials/water").values
        for key in ("optimizer", "schedule", "train", "seed"):
            assert found[key] == wanted[key]
        assert found["checkpoint"]["monitor"] == wanted["checkpoint"]["monitor"]
        assert found["task"]["model"]["descriptor"] == {
            key: value for key, value in wanted["task"]["model"]["descriptor"].items() if key != "dt"
        }


@pytest.mark.parametrize(
    ("changes", "path", "expected"),
    [
        ({"model__descriptor__type": "se_a"}, "task.model.descriptor.class", "se_e2_a"),
        ({"model__descriptor__sel": [5, 6]}, "task.model.descriptor.sel", [5, 6]),
        ({"model__descriptor__rcut": 4.5}, "task.model.descriptor.cutoff", 4.5),
        ({"model__descriptor__rcut_smth": 0.7}, "task.model.descriptor.smooth", 0.7),
        ({"model__descriptor__neuron": ...}, "task.model.descriptor.widths", [10, 20, 40]),
        ({"model__descriptor__axis_neuron": ...}, "task.model.descriptor.axis_width", 4),
        ({"model__descriptor__resnet_dt": True}, "task.model.descriptor.dt", True),
        ({}, "task.model.descriptor.one_side", False),
        ({"model__descriptor__type_one_side": True}, "task.model.descriptor.one_side", True),
        ({"model__fitting_net__neuron": ...}, "task.model.fitting_widths", [120, 120, 120]),
        ({"model__fitting_net__resnet_dt": False}, "task.model.fitting_dt", False),
        ({"model__data_stat_nbatch": 3}, "task.statistics_frames", 3),
        ({"training__stat_file": "/a/b.hdf5"}, "task.statistics_file", "/a/b.hdf5"),
        ({}, "task.labels", ["energy", "force"]),
        ({"loss__start_pref_v": 0.1}, "task.labels", ["energy", "force", "virial"]),
        ({"loss__limit_pref_ae": 1, "loss__limit_pref_f": 0, "loss__start_pref_f": 0}, "task.labels",
         ["energy", "atom_energy"]),
        ({"loss__start_pref_v": 0.1, "loss__limit_pref_v": 2}, "train.loss_weights.virial.end", 2),
        ({"loss__start_pref_e": 0.5}, "train.loss_weights.energy.start", 0.5),
        ({}, "train.loss_weights.force.start", 1000),
        ({"model__fitting_net__precision": "float32", "model__descriptor__precision": "float32"}, "train.precision",
         "32"),
        ({"model__descriptor__precision": "float32"}, "train.precision", "64"),
        ({"model__descriptor__precision": "float32"}, "task.model.descriptor.precision", "32"),
        ({}, "schedule.name", "exponential"),
        ({"learning_rate__type": "cosine", "learning_rate__decay_steps": ...}, "schedule.name", "cosine"),
        ({"learning_rate__type": "cosine", "learning_rate__decay_steps": ...}, "schedule.end", 1e-5),
        ({"learning_rate__decay_steps": ...}, "schedule.every", 5000),
        ({"learning_rate__decay_rate": 0.9}, "schedule.gamma", 0.9),
        ({"learning_rate__smooth": True}, "schedule.every", 1),
        ({"learning_rate__smooth": True, "learning_rate__decay_rate": 0.25, "learning_rate__decay_steps": 2},
         "schedule.gamma", 0.5),
        ({"learning_rate__stop_lr": ..., "learning_rate__stop_lr_ratio": 0.5}, "schedule.end", 5e-4),
        ({"learning_rate__stop_lr": ...}, "schedule.end", 5e-8),
        ({"optimizer": {"type": "AdamW"}}, "optimizer.weight_decay", 0.001),
        ({"optimizer": {"adam_beta1": 0.8}}, "optimizer.betas", [0.8, 0.999]),
        ({"training__training_data__auto_prob": ...}, "data.probabilities", "size"),
        ({"training__training_data__auto_prob": "prob_uniform"}, "data.probabilities", "uniform"),
        ({"training__training_data__auto_prob": "prob_sys_size;0:1:0.3;1:2:0.7"}, "data.probabilities",
         "size;0:1:0.3;1:2:0.7"),
        ({"training__training_data__sys_probs": [0.25, 0.75]}, "data.probabilities", [0.25, 0.75]),
        ({"training__training_data__batch_size": ...}, "data.batch_size", "auto"),
        ({"training__training_data__batch_size": "auto:64"}, "data.batch_size", "auto:64"),
        ({"training__training_data__batch_size": [2, 3]}, "data.batch_size", [2, 3]),
        ({"training__training_data__batch_size": "mixed:6"}, "data.batch_size", 6),
        ({"training__training_data__batch_size": "mixed:6"}, "data.batches", "mixed"),
        ({"training__validation_data__batch_size": 5}, "data.eval_batch_size", 5),
        ({"training__validation_data__batch_size": "auto"}, "data.eval_batch_size", None),
        ({"training__validation_data__batch_size": "mixed:5"}, "data.eval_batch_size", 5),
        ({}, "train.limit_val_batches", 1),
        ({"training__validation_data__numb_btch": 7}, "train.limit_val_batches", 7),
        ({"training__validation_data": None}, "train.evaluate", "never"),
        ({"training__validation_data": ...}, "train.evaluate", "never"),
        ({"training__numb_steps": ..., "training__num_epoch": 3}, "train.epochs", 3),
        ({"training__numb_steps": ..., "training__num_epoch": 3.0}, "train.epochs", 3),
        ({}, "train.epochs", None),
        ({"training__seed": 4}, "seed", 4),
        ({"training__disp_freq": 7}, "observe.every", 7),
        ({"training__disp_freq": 7}, "train.evaluate", "7 steps"),
        ({"training__disp_file": "out/curve.txt"}, "observe.curve", "curve.txt"),
        ({"training__save_freq": 9}, "checkpoint.every", "9 steps"),
        ({}, "checkpoint.keep", 5),
        ({"training__max_ckpt_keep": 1}, "checkpoint.keep", 2),
        ({}, "checkpoint.monitor", "val/force_rmse"),
        ({"loss__start_pref_f": 0, "loss__limit_pref_f": 0}, "checkpoint.monitor", "val/energy_rmse"),
        ({"training__gradient_max_norm": 2.5}, "train.clip", 2.5),
        ({"training__gradient_max_norm": 0.0}, "train.clip", None),
        ({"training__tensorboard": True}, "observe.tensorboard", 1),
    ],
)  # fmt: skip
def test_a_key_has_a_place_in_the_recipe(changes, path, expected):
    assert at(loaded(**changes).values, path) == expected


VALUES = {"axis_neuron": 3, "neuron": [8, 8], "numb_steps": 7, "num_epoch": 2, "auto_prob": "prob_sys_size",
          "sys_probs": None, "numb_btch": 3}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_keys_have_other_names(name):
    key = ALIASES[name]
    without: dict[str, Any] = {key.replace(".", "__"): ...}
    if key == "training.num_epoch":
        without["training__numb_steps"] = ...
    value = VALUES[key.rpartition(".")[2]]
    by_alias, by_name = ({**without, word.replace(".", "__"): value} for word in (name, key))
    assert loaded(**by_alias).values == loaded(**by_name).values


@pytest.mark.parametrize("override", ["training.numb_steps=7", "training.stop_batch=7", "training.num_step=7"])
@pytest.mark.parametrize("name", ["numb_steps", "stop_batch"])
def test_an_override_may_call_a_key_otherwise_than_the_file(name, override):
    changes = {"training__numb_steps": ..., f"training__{name}": 40}
    assert loaded(overrides=[override], **changes).recipe.train.steps == 7
    key, _, value = override.partition("=")
    assert loaded(overrides={key: int(value)}, **changes).recipe.train.steps == 7
    assert loaded(overrides=[f"~{key}", "training.num_epoch=3"], **changes).recipe.train.epochs == 3


class TestWhatIsNotSupported:
    """Nothing in a file is passed over."""

    @pytest.mark.parametrize("key", sorted(ONLY))
    def test_a_value_that_cannot_be_honoured_is_refused(self, key):
        said = wrong(**{key.replace(".", "__"): "something else"})
        assert f"{key}: " in said
        assert "not supported here; " in said

    @pytest.mark.parametrize(("key", "value"), [(key, value) for key, (known, _) in ONLY.items() for value in known])
    def test_a_value_that_means_what_is_done_passes(self, key, value):
        assert loaded(**{key.replace(".", "__"): value}).values == loaded().values

    @pytest.mark.parametrize("key", NEEDLESS)
    def test_what_is_about_words_alone_passes(self, key):
        assert loaded(**{key.replace(".", "__"): True}).values == loaded().values

    def test_all_of_it_is_said_at_once_with_file_and_line(self):
        said = wrong(training__tensorbord=True, training__enable_ema=True, learning_rate__type="wsd")
        assert "3 problems" in said
        assert "input.json:" in said
        assert 'training.tensorbord: unknown key; did you mean "training.tensorboard"?' in said
        assert "train.ema=0.999 beside ~training.enable_ema" in said
        assert 'learning_rate.type: "wsd" is not supported here; known is exp, cosine' in said

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"model__type_map": ...}, "model.type_map: needed here"),
            ({"model__descriptor__type": ...}, "model.descriptor.type: needed here"),
            ({"training__training_data__systems": ...}, "training.training_data.systems: needed here"),
            ({"learning_rate": ...}, "learning_rate.start_lr: needed here"),
            ({"learning_rate__stop_lr_ratio": 0.1}, "either stop_lr or stop_lr_ratio"),
            ({"training__numb_steps": ...}, "either numb_steps or num_epoch"),
            ({"training__num_epoch": 3}, "either numb_steps or num_epoch"),
            ({"training__numb_steps": ..., "training__num_epoch": 2.5}, "expected whole epochs, found 2.5"),
            ({"training__numb_steps": "many"}, 'training.numb_steps: expected a whole number, found "many"'),
            ({"training__numb_steps": 0}, "training.numb_steps: train.steps: expected a number of at least 1"),
            ({"training__stop_batch": 3}, "another name of training.numb_steps"),
            ({"model__descriptor__neuron": [1, "x"]}, "expected a list of whole numbers"),
            ({"model__descriptor__sel": "auto:much"}, "auto or auto:1.2"),
            ({"model__descriptor__sel": "auto:nan"}, "auto or auto:1.2"),
            ({"model__descriptor__sel": "auto:0.5"}, "at least auto:1"),
            ({"model__descriptor__precision": "bfloat16"}, "known is default, float64, float32"),
            ({"model__fitting_net__precision": "float32"}, "cannot be float64 beside a fitting_net of float32"),
            ({"training__training_data__batch_size": "max:64"}, "auto:N and mixed:N"),
            ({"training__training_data__batch_size": "auto:x"}, "auto:N and mixed:N"),
            ({"training__training_data__batch_size": "auto:"}, "auto:N and mixed:N"),
            ({"training__training_data__batch_size": "mixed:"}, "auto:N and mixed:N"),
            ({"training__validation_data__batch_size": "max:64"}, 'validation_data.batch_size: "max:64" is not'),
            ({"training__training_data__auto_prob": "prob_size"}, "known is prob_uniform, prob_sys_size"),
            ({"learning_rate__type": "cosine"}, "learning_rate.decay_steps: means nothing where the type is cosine"),
            ({"learning_rate__decay_steps": 0, "learning_rate__decay_rate": 0.9, "learning_rate__smooth": True},
             "learning_rate.decay_steps: expected a number of at least 1"),
            ({"learning_rate__decay_rate": -0.9, "learning_rate__smooth": True}, "a number above 0 and up to 1"),
            ({"learning_rate__decay_rate": 2}, "expected a number above 0 and up to 1"),
            ({"learning_rate__scale_by_worker": "square"}, "known is linear, sqrt, none"),
            ({"optimizer": {"type": "LKF"}}, "known is Adam, AdamW"),
            ({"loss__start_pref_e": 0, "loss__limit_pref_e": 0, "loss__start_pref_f": 0, "loss__limit_pref_f": 0},
             "there is nothing to learn"),
            ({"loss__limit_pref_f": -1}, "loss.limit_pref_f: expected 0 or more, found -1"),
            ({"model__fitting_net": [1]}, "model.fitting_net: expected a section"),
            ({"modell": {}}, 'modell: unknown key; did you mean "model"?'),
            ({"training__training_data__system": ["one"]}, 'did you mean "training.training_data.systems"?'),
            ({"training__numb_btch": 3}, "training.numb_btch: unknown key"),
        ],
    )  # fmt: skip
    def test_what_is_wrong_is_said_in_the_words_of_the_file(self, changes, expected):
        assert expected in wrong(**changes)

    def test_a_wrong_value_is_not_missed_as_well(self):
        assert "say either" not in wrong(training__numb_steps="many")


@pytest.mark.parametrize("overrides", [["trainig.numb_steps=5"], {"trainig.numb_steps": 5}])
def test_a_misspelt_section_of_the_file_is_not_taken_for_one_of_a_recipe(folder, overrides):
    with pytest.raises(RecipeError, match='trainig: unknown key; did you mean "training"'):
        loaded(overrides=overrides)
    with pytest.raises(RecipeError, match='trane: unknown key; did you mean "train"'):
        loaded(overrides=["trane.epochs=5"])


def test_comments_pass_at_any_level():
    comments = {"_comment": "a", "_note": ["b"], "model___comment": 1, "model__descriptor___sel_of_old": {}}
    assert loaded(**comments, training__training_data___systems="c").values == loaded().values


class TestSystems:
    def test_a_path_begins_in_the_current_folder_as_there(self, folder, monkeypatch):
        path = write(folder / "inputs")
        (folder / "one").mkdir()
        assert load_recipe(path).values["data"]["train"] == [str(folder / "one"), str(folder / "inputs/two")]
        monkeypatch.chdir(folder / "inputs")
        assert load_recipe("input.json").values["data"]["train"] == [
            str(folder / "inputs/one"), str(folder / "inputs/two")
        ]  # fmt: skip

    def test_one_that_is_in_neither_place_is_said_with_both(self, folder):
        path = write(folder / "inputs", training__training_data__systems=["no"])
        with pytest.raises(RecipeError, match=f"not as {folder}/no, and not as {folder}/inputs/no"):
            load_recipe(path)

    def test_what_to_type_where_systems_have_moved_is_said_once(self, folder):
        said = wrong(training__training_data__systems=["no", "none"])
        assert said.count("there is no ") == 2
        assert said.count('"training.training_data.systems=[FOLDER, …]"') == said.count("recipe import FILE") == 1

    def test_one_can_be_a_group_of_a_file(self, folder):
        (folder / "all.hdf5").touch()
        found = loaded(training__training_data__systems="all.hdf5#/water/1")
        assert found.values["data"]["train"] == [f"{folder}/all.hdf5#/water/1"]

    def test_numbers_of_neighbours_can_be_left_to_the_data(self, folder):
        write_systems(folder)
        counted = [most_neighbours(folder / name) for name in ("one", "two")]
        exact = [max(numbers) for numbers in zip(*counted, strict=True)]
        for sel, factor in ((..., 1.1), ("auto", 1.1), ("auto:1.5", 1.5)):
            found = loaded(model__descriptor__sel=sel)
            room = [math.ceil(math.floor(number * factor) / 4) * 4 for number in exact]
            assert at(found.values, "task.model.descriptor.sel") == room
            assert any(f"has more than {exact}" in note for note in found.notes)

    @pytest.mark.parametrize(("most", "room"), [(2, 4), (4, 4), (5, 8), (11, 12), (33, 36), (40, 44), (200, 220)])
    def test_numbers_of_neighbours_get_the_room_that_they_have_there(self, folder, monkeypatch, most, room):
        monkeypatch.setattr("isoscale.science.potentials.deepmd.translation._most_neighbours", lambda values: [most, 0])
        found = loaded(model__descriptor__sel="auto")
        assert at(found.values, "task.model.descriptor.sel") == [room, 0]


def most_neighbours(system: Path, cutoff: float = 3.0) -> list[int]:
    """The most neighbours of each type, counted pair by pair."""
    types = np.loadtxt(system / "type.raw", dtype=int)
    shifts = np.array(list(itertools.product((-5, 0, 5), repeat=3)))
    found = []
    for coord in np.load(system / "set.000/coord.npy").reshape(-1, len(types), 3):
        images = coord[None, :, None] + shifts[None, None] - coord[:, None, None]
        distance = np.sqrt((images**2).sum(-1))
        near = ((distance < cutoff) & (distance > 0)).sum(-1)
        found.append([near[:, types == kind].sum(-1).max() for kind in (0, 1)])
    return [int(number) for number in np.max(found, axis=0)]


class TestOverrides:
    def test_words_of_the_file_change_it_and_others_the_recipe(self):
        words = [
            "training.numb_steps=7",
            "~learning_rate.stop_lr",
            "learning_rate.stop_lr_ratio=0.1",
            "observe.every=3",
        ]
        found = loaded(overrides=[*words, "model.descriptor.neuron=[3, 6]", "training.validation_data.systems=[one]"])
        assert (found.recipe.train.steps, found.recipe.observe.every) == (7, 3)
        assert found.recipe.schedule.end == pytest.approx(1e-4)
        assert at(found.values, "task.model.descriptor.widths") == [3, 6]
        assert found.values["data"]["val"] == [str(Path.cwd() / "one")]

    def test_words_of_the_recipe_win(self):
        assert loaded(overrides=["train.steps=5", "training.numb_steps=7"]).recipe.train.steps == 5

    def test_they_are_the_same_from_python(self):
        keys = {"training.numb_steps": 7, "observe.every": 3}
        assert loaded(overrides=keys).values == loaded(overrides=["training.numb_steps=7", "observe.every=3"]).values

    def test_a_mapping_is_an_input_as_well(self, folder):
        write(folder)
        assert load_recipe(changed(), {"training.numb_steps": 7}).values == loaded(training__numb_steps=7).values

    def test_every_value_says_which_key_it_comes_from(self):
        origins = loaded(overrides=["training.numb_steps=7", "train.device=cpu"]).origins
        name = str(Path.cwd() / "input.json")
        assert origins[("train", "steps")] == "command line: training.numb_steps"
        assert origins[("train", "device")] == "command line"
        assert origins[("optimizer", "lr")] == f"{name}: learning_rate.start_lr"
        assert origins[("checkpoint", "keep")] == "default of DeePMD-kit: training.max_ckpt_keep"
        assert origins[("train", "nan")] == "default"

    def test_the_recipe_reads_back_as_the_same(self, folder):
        found = loaded(world=2)
        (folder / "back.yaml").write_text(found.to_yaml())
        assert load_recipe(folder / "back.yaml").values == found.values

    def test_a_key_that_cannot_be_set_is_said(self):
        with pytest.raises(RecipeError, match="not set in this recipe"):
            loaded(overrides=["~training.seed"])

    def test_a_sweep_speaks_both(self, folder):
        points = {"a": {"learning_rate.start_lr": 1e-2}, "b": {"optimizer.lr": 1e-4}}
        found = load_variants(write(folder), ["training.numb_steps=3"], points)
        assert [each.recipe.optimizer.lr for each in found.values()] == [1e-2, 1e-4]
        assert [each.recipe.train.steps for each in found.values()] == [3, 3]
        assert found["a"].origins[("optimizer", "lr")] == "sweep: learning_rate.start_lr"
        with pytest.raises(RecipeError, match=r"learning_rate\.kind: unknown key.*\(in the point c\)"):
            load_variants(write(folder), [], {"c": {"learning_rate.kind": 1}})


class TestWorkers:
    @pytest.mark.parametrize("world", [1, 2, 4])
    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            (3, {1: 3, 2: 6, 4: 12}),
            ([2, 3], {1: [2, 3], 2: [4, 6], 4: [8, 12]}),
            ("auto", {1: "auto", 2: "auto:32x2", 4: "auto:32x4"}),
            ("auto:9", {1: "auto:9", 2: "auto:9x2", 4: "auto:9x4"}),
            ("mixed:4", {1: 4, 2: 8, 4: 16}),
        ],
    )
    def test_the_batch_is_that_of_each(self, world, given, expected):
        found = loaded(world, training__training_data__batch_size=given)
        assert found.recipe.data.batch_size == expected[world]

    @pytest.mark.parametrize("given", [3, [2, 3], "auto", "auto:9", "mixed:4"])
    @pytest.mark.parametrize(("rule", "factor"), [(..., 4), ("linear", 4), ("sqrt", 2), ("none", 1)])
    def test_the_learning_rate_follows_their_number(self, given, rule, factor):
        changes = {"training__training_data__batch_size": given, "learning_rate__scale_by_worker": rule}
        peaks = [_peak(loaded(world, **changes)) for world in (1, 4)]
        assert peaks == pytest.approx([1e-3, factor * 1e-3])

    def test_the_learning_rate_does_not_mind_small_systems(self, folder):
        """Of four frames each, which no batch of eight fits into."""
        write_systems(folder)
        found = loaded(2, training__training_data__batch_size=8, training__numb_steps=1, training__disp_freq=1)
        run = isoscale.train(found.values, run="run", **QUIET)
        assert run.metrics["lr"] == pytest.approx(2e-3)

    def test_the_ranks_of_this_start_are_counted(self, folder, monkeypatch):
        for name, value in {
            "RANK": "1",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "1",
            "MASTER_ADDR": "here",
            "MASTER_PORT": "1",
        }.items():
            monkeypatch.setenv(name, value)
        found = load_recipe(write(folder))
        assert found.recipe.data.batch_size == 4
        assert found.origins[("data", "batch_size")].endswith("training.training_data.batch_size × 4 ranks")
        assert any("each of the 4 ranks" in note for note in found.notes)

    @pytest.mark.parametrize("rule", ["linear", "none"])
    def test_steps_can_follow_their_number_too(self, rule):
        found = loaded(4, ["schedule.scale_steps=true"], learning_rate__scale_by_worker=rule)
        assert (found.recipe.schedule.base_batch_size, found.recipe.data.batch_size) == (1, 4)

    def test_no_rule_stands_in_the_recipe_of_one(self):
        assert loaded().recipe.schedule.scale == "none"


class _Frames:
    def __init__(self, sample_size: int) -> None:
        self.sample_size = sample_size

    def __len__(self) -> int:
        return 1000

    def fetch(self, indices: Any) -> dict[str, Any]:
        return {"index": indices}


def _peak(found: LoadedRecipe) -> float:
    """The highest learning rate on systems of 5 and 20 atoms."""
    recipe = found.recipe
    sizes = system_batch_sizes(Mixture([_Frames(5), _Frames(20)]), recipe.data.batch_size)
    return LearningRate.make(recipe.schedule, recipe.optimizer.lr, max(sizes), 100)(0)


def test_what_is_otherwise_here_is_said():
    notes = loaded(
        model__descriptor__seed=1, training__save_ckpt="model", training__disp_file="a/b", training__max_ckpt_keep=1,
        learning_rate__decay_steps=40,
    ).notes  # fmt: skip
    epochs = {"training__numb_steps": ..., "training__num_epoch": 2}
    notes += loaded(**epochs, training__training_data__auto_prob="prob_uniform").notes
    for key in ("model.descriptor.seed", "training.save_ckpt", "training.disp_file", "training.max_ckpt_keep",
                "learning_rate.decay_steps", "training.num_epoch"):  # fmt: skip
        assert any(f"{key}: " in note for note in notes)
    assert loaded().notes == loaded(**epochs).notes == []


class TestImport:
    def run(self, *words: str) -> Any:
        result = CliRunner().invoke(app, ["import", *words])
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    def test_the_recipe_that_is_written_is_the_same_training(self, folder):
        self.run(str(write(folder)), "training.numb_steps=7", "--out", "mine.yaml")
        assert load_recipe("mine.yaml").values == loaded(overrides=["training.numb_steps=7"]).values
        text = Path("mine.yaml").read_text()
        assert "steps: 7  # command line: training.numb_steps" in text
        assert "lr: 0.001  # learning_rate.start_lr" in text

    def test_an_input_can_be_yaml(self, folder):
        write(folder)
        (folder / "input.yaml").write_text(yaml.safe_dump(changed()))
        assert load_recipe("input.yaml").values == load_recipe("input.json").values
        assert self.run("input.yaml").exit_code == 0

    def test_what_there_is_to_know_is_said(self, folder):
        said = self.run(str(write(folder, model__descriptor__seed=1)), "--out", "mine.yaml").stdout
        assert "model.descriptor.seed: one seed" in said
        assert "for 4 ranks, four times as much" in said

    def test_systems_may_have_moved(self, folder):
        path = write(folder, training__training_data__systems=["../old/one/", "/gone/two"])
        self.run(str(path), "--data", ".", "--out", "mine.yaml")
        assert load_recipe("mine.yaml").values["data"]["train"] == [str(folder / "one"), str(folder / "two")]

    def test_systems_that_have_moved_are_told_apart_by_as_much_of_their_paths_as_it_takes(self, folder):
        for name in ("a/data", "b/data", "data"):
            (folder / "moved" / name).mkdir(parents=True)
        systems = {"training__training_data__systems": ["/old/a/data", "../b/data", "c/data"]}
        path = write(folder, **systems, training__validation_data=...)
        self.run(str(path), "--data", "moved", "--out", "mine.yaml")
        found = load_recipe("mine.yaml").values["data"]["train"]
        assert found == [f"{folder}/moved/{name}" for name in ("a/data", "b/data", "data")]
        path = write(folder, training__training_data__systems=["/c/data", "/d/data"], training__validation_data=...)
        with pytest.raises(RecipeError, match=f"several systems would be {folder}/moved/data"):
            self.run(str(path), "--data", "moved", "--out", "mine.yaml")

    def test_a_file_with_groups_may_have_moved(self, folder):
        (folder / "moved").mkdir()
        (folder / "moved/all.hdf5").touch()
        systems = {"training__training_data__systems": ["/gone/all.hdf5#/water/1"], "training__validation_data": ...}
        self.run(str(write(folder, **systems)), "--data", "moved", "--out", "mine.yaml")
        assert load_recipe("mine.yaml").values["data"]["train"] == [f"{folder}/moved/all.hdf5#/water/1"]

    def test_words_of_a_recipe_belong_there(self, folder):
        with pytest.raises(UserError, match=r"train\.device=cpu is not a key of"):
            self.run(str(write(folder)), "train.device=cpu")

    def test_an_input_cannot_be_extended(self, folder):
        write(folder)
        (folder / "mine.yaml").write_text("extends: input.json\n")
        with pytest.raises(RecipeError, match="isoscale recipe import"):
            load_recipe("mine.yaml")


def test_the_page_says_what_becomes_of_every_key():
    page = PAGE.read_text(encoding="utf-8")
    keys = {*DEFAULTS, *ONLY, *NEEDLESS, *ALIASES} - ELSEWHERE
    missing = sorted(key for key in keys if f"`{key}`" not in page)
    assert not missing


@pytest.mark.slow
class TestTraining:
    """The real thing, on systems of six atoms."""

    WORDS = ("training.numb_steps=4", "training.disp_freq=2", "observe.level=error", "train.device=cpu")

    @pytest.fixture(autouse=True)
    def systems(self, folder):
        write_systems(folder)
        write(folder)

    def test_an_input_trains_as_it_is(self):
        run = isoscale.train("input.json", run="run", **{**QUIET, "training.numb_steps": 4, "training.disp_freq": 2})
        assert run.summary()["step"] == 4
        assert Path("run/lcurve.out").is_file()

    def test_a_run_goes_on_with_the_batch_of_its_first_start(self, folder):
        first = cli("train", "input.json", *self.WORDS, "--run", "run", "--devices", "2", cwd=folder)
        assert first.returncode == 0, first.stderr
        assert _batch("run") == 2
        other = cli("train", "input.json", *self.WORDS, "training.numb_steps=6", "--run", "run", cwd=folder)
        assert other.returncode == 0, other.stderr
        alone = cli("train", "--run", "run", "train.steps=8", "--devices", "2", cwd=folder)
        assert alone.returncode == 0, alone.stderr
        assert (_batch("run"), json.loads(Path("run/run.json").read_text())["step"]) == (2, 8)

    def test_other_words_are_refused(self, folder):
        assert cli("train", "input.json", *self.WORDS, "--run", "run", cwd=folder).returncode == 0
        batch = "training.training_data.batch_size=2"
        refused = cli("train", "input.json", *self.WORDS, batch, "--run", "run", cwd=folder)
        assert (refused.returncode, "data.batch_size: 1 → 2" in refused.stderr) == (2, True)
        refused = cli("train", "--run", "run", "training.numb_steps=6", cwd=folder)
        assert (refused.returncode, "name the file as well" in refused.stderr) == (2, True)


def _batch(run: str) -> Any:
    return load_recipe(Path(run) / "recipe.yaml").recipe.data.batch_size
