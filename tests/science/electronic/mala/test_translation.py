"""Parameter files of MALA 1.4.0 as recipes: real files, with one or the other parameter changed as MALA saves it."""

import copy
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from isoscale.errors import UserError
from isoscale.recipe.importing.reading import to_yaml
from isoscale.recipe.load import load_recipe
from isoscale.science.electronic.mala.files import read_parameters
from isoscale.science.electronic.mala.tables import DEFAULTS, NOT_ABOUT_TRAINING, OLDER
from isoscale.science.electronic.mala.translation import ABOUT_TRAINING, Said, translate
from isoscale.science.importing import Imported, PeerFile
from tests.helpers import train

FILES = Path(__file__).parent / "files"
PAGE = Path(__file__).parents[4] / "docs/how-to/coming-from/mala.md"
GPU = {"use_gpu": True, "running.use_graphs": True, "data.use_fast_tensor_data_set": True}


def values(name: str = "be2", **changes: Any) -> dict[str, Any]:
    """A stored file with some parameters set: `running__optimizer="SGD"`."""
    found: dict[str, Any] = json.loads((FILES / f"{name}.params.json").read_text())
    for key, value in changes.items():
        section, _, name = key.replace("__", ".").rpartition(".")
        (found[section] if section else found)[name] = value
    return found


def imported(name: str = "be2", folder: str | None = None, **changes: Any) -> Imported:
    return translate(PeerFile("a file", values(name, **changes), moved=Path(folder) if folder else None), [])


def section(path: str, **changes: Any) -> Any:
    """A part of the recipe."""
    found: Any = imported(**changes).values
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    return found


def remarked(**changes: Any) -> dict[str, str]:
    """What is to be done by hand, by parameter."""
    return dict(imported(folder=str(FILES), **changes).by_hand)


def snapshot(name: str, role: str, folder: str = "Be2/", **changes: Any) -> dict[str, Any]:
    data = {"input_npy_file": f"{name}.in.npy", "output_npy_file": f"{name}.out.npy", "input_npy_directory": folder,
            "output_npy_directory": folder, "calculation_output": "", "snapshot_function": role,
            "snapshot_type": "numpy"}  # fmt: skip
    return {"object": "Snapshot", "data": {**data, **changes}}


def test_the_example_becomes_its_recipe():
    assert imported().values == {
        "seed": 1234,
        "task": {
            "class": "ldos",
            "model": {"class": "mlp", "widths": [91, 100, 11], "activation": "relu"},
            "loss": "mse",
            "energies": {"size": 11, "spacing": 2.5, "offset": -5},
            "clamp": True,
            "physics": {"metrics": ["band_energy"], "every": 5},
        },
        "data": {
            "class": "snapshots", "path": "Be2", "train": ["Be_snapshot0"], "val": ["Be_snapshot1"],
            "test": ["Be_snapshot2"], "columns": "3:", "batch_size": 40,
            "transforms": [
                {"class": "scale", "key": "input", "kind": "standard", "per": "feature"},
                {"class": "scale", "key": "target", "kind": "minmax", "per": "whole"},
            ],
        },
        "optimizer": {"name": "adam", "lr": 0.001},
        "train": {"epochs": 5},
        "checkpoint": {"every": "2 epochs"},
    }  # fmt: skip


def test_what_nobody_set_is_as_it_is_there_and_needs_no_mention():
    found = imported("default")
    task, data = found.values["task"], found.values["data"]
    assert (data["batch_size"], found.values["optimizer"]["lr"], found.values["train"]["epochs"]) == (10, 1e-5, 100)
    assert (task["model"]["activation"], task["model"]["output_activation"]) == ("leaky_relu", "leaky_relu")
    assert "transforms" not in data and "schedule" not in found.values and "physics" not in task
    assert not found.needless
    assert {remark.parameter for remark in found.by_hand} == {
        "targets.ldos_gridspacing_ev", "data.snapshot_directories_list"
    }  # fmt: skip
    load_recipe(found.values, check_components=True)


def test_the_table_of_defaults_is_that_of_a_file_that_nobody_touched():
    said = Said(values("default"))
    assert {key: said[key] for key in DEFAULTS} == DEFAULTS
    assert set(said._values) <= set(DEFAULTS)


def test_parameters_that_a_file_does_not_have_are_as_there():
    stored = values("default")
    short = {**stored, "running": {"_parameters_type": "ParametersRunning"}, "network": {}, "data": {}}
    whole, found = imported("default").values, translate(PeerFile("a file", short), []).values
    assert found == whole


@pytest.mark.parametrize(
    ("given", "include", "hidden", "output"),
    [
        ("ReLU", True, "relu", "relu"),
        ("Tanh", False, "tanh", None),
        (["Sigmoid", "Sigmoid"], True, "sigmoid", None),
        (["SiLU", "SiLU", "ReLU"], True, "silu", "relu"),
        (["GELU", "GELU", "ReLU"], False, "gelu", None),
        (["ELU", "ELU", "Softplus", "ReLU"], True, "elu", "softplus"),
        (["ReLU", "ReLU", None], True, "relu", None),
        (["ReLU", "Tanh"], True, ["relu", "tanh"], None),
    ],
)
def test_activations_are_those_of_every_layer(given: Any, include: bool, hidden: Any, output: str | None):
    changes = {"network__layer_sizes": [91, 5, 5, 11], "network__layer_activations": given,
               "network__layer_activations_include_output_layer": include}  # fmt: skip
    model = section("task.model", **changes)
    assert (model["activation"], model.get("output_activation")) == (hidden, output)
    assert not remarked(**changes)


@pytest.mark.parametrize("given", [["ReLU"], [None, None], None, "Hardtanh"])
def test_activations_that_a_network_here_cannot_have_are_said(given: Any):
    changes = {"network__layer_sizes": [91, 5, 5, 11], "network__layer_activations": given}
    assert "here every hidden layer has one of" in remarked(**changes)["network.layer_activations"]


def test_one_activation_in_the_list_of_an_older_file_is_that_of_all_layers():
    stored = values(network__layer_activations=["ReLU"])
    del stored["network"]["layer_activations_include_output_layer"]
    found = translate(PeerFile("a file", stored), [])
    assert found.values["task"]["model"]["output_activation"] == "relu"
    assert "network.layer_activations" in dict(found.by_hand)


def test_parameters_of_older_versions_are_understood():
    changes = {"running__trainingtype": "SGD", "running__weight_decay": 0.1, "running__visualisation": 2,
               "running__visualisation_dir": "mala_vis", "running__after_before_training_metric": "fermi_energy",
               "running__during_training_metric": "dos"}  # fmt: skip
    stored = values(**changes)
    for key in OLDER.values():
        part, _, name = key.rpartition(".")
        stored[part].pop(name, None)
    found = translate(PeerFile("a file", stored), [])
    assert found.values["optimizer"] == {"name": "sgd", "lr": 0.001, "weight_decay": 0.1}
    assert found.values["task"]["physics"] == {"metrics": ["dos", "fermi_energy"], "every": 1}
    assert found.values["observe"] == {"tensorboard": 2}
    assert "running.visualisation_dir" in dict(found.needless)
    assert not found.by_hand[1:]


def test_an_earlier_name_beside_the_present_one_is_passed_over_as_there():
    changes = {"running__trainingtype": "SGD"}
    assert section("optimizer.name", **changes) == "adam"
    assert "running.optimizer, which counts" in remarked(**changes)["running.trainingtype"]


def test_a_network_without_hidden_layers_needs_no_activation():
    changes = {"network__layer_sizes": [91, 11]}
    assert section("task.model", **changes) == {"class": "mlp", "widths": [91, 11]}
    assert not remarked(**changes)


@pytest.mark.parametrize(
    ("changes", "path", "expected"),
    [
        ({"running__optimizer": "FusedAdam"}, "optimizer.name", "adam"),
        ({"running__l2_regularization": 1e-3}, "optimizer.weight_decay", 1e-3),
        ({"running__use_mixed_precision": True}, "train.precision", "fp16"),
        ({"data__use_lazy_loading": True}, "data.residency", "disk"),
        ({"running__use_shuffling_for_samplers": False}, "data.shuffle", False),
        ({"running__early_stopping_epochs": 3}, "train.early_stopping", {"patience": 3}),
        ({"running__checkpoints_each_epoch": 1}, "checkpoint.every", "1 epoch"),
        ({"running__logger": "tensorboard"}, "observe.tensorboard", 1),
        ({"running__logger": "wandb"}, "observe.loggers", ["wandb"]),
        ({"running__training_log_interval": 10}, "observe.every", 10),
        ({"running__run_name": "first"}, "name", "first"),
        ({"verbosity": 2}, "observe.level", "debug"),
        ({"verbosity": 0}, "observe.level", "warning"),
        ({"manual_seed": None}, "seed", 0),
        ({"targets__restrict_targets": None}, "task.clamp", False),
        ({"targets__ldos_gridsize": 12}, "task.energies.size", 12),
        ({"data__input_rescaling_type": "None", "data__output_rescaling_type": "None"}, "data.transforms", None),
    ],
)
def test_each_switch_has_its_key(changes: dict[str, Any], path: str, expected: Any):
    assert section(path, **changes) == expected
    assert not remarked(**changes)
    load_recipe(imported(**changes).values)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("standard", ("standard", "whole")),
        ("feature-wise-standard", ("standard", "feature")),
        ("minmax", ("minmax", "whole")),
        ("normal", ("minmax", "whole")),
        ("feature-wise-minmax", ("minmax", "feature")),
        ("feature-wise-normal", ("minmax", "feature")),
    ],
)
def test_scalings_have_the_same_meaning(kind: str, expected: tuple[str, str]):
    first, second = section("data.transforms", data__input_rescaling_type=kind)
    assert (first["key"], first["kind"], first["per"]) == ("input", *expected)
    assert second["key"] == "target"


def test_descriptors_without_coordinates_are_all_used():
    stored = values()
    stored["descriptors"]["descriptors_contain_xyz"] = False
    assert translate(PeerFile("a file", stored), []).values["data"]["columns"] is None


def test_a_plateau_is_watched_in_the_metric_that_is_validated():
    changes = {"running__learning_rate_scheduler": "ReduceLROnPlateau", "running__learning_rate_decay": 0.3,
               "running__learning_rate_patience": 2, "running__early_stopping_epochs": 4}  # fmt: skip
    assert section("schedule", **changes) == {"name": "plateau", "gamma": 0.3, "patience": 2}
    changes |= {"running__validation_metric": "band_energy_actual_fe"}
    found = imported(**changes).values
    watched = "val/band_energy_true_fermi"
    assert found["task"]["physics"] == {"metrics": ["band_energy_true_fermi", "band_energy"], "every": 1}
    assert found["schedule"]["monitor"] == found["train"]["early_stopping"]["monitor"] == watched
    assert found["checkpoint"]["monitor"] == watched
    load_recipe(found, check_components=True)


def test_logged_metrics_are_measured_as_often_as_there():
    changes = {"running__logging_metrics": ["ldos", "dos_relative"], "running__logging_metrics_interval": 4}
    assert section("task.physics", **changes) == {"metrics": ["dos_relative", "band_energy"], "every": 4}


def test_what_needs_no_word_is_said_with_the_reason():
    stored = values(data__shuffling_seed=7, data__use_lazy_loading_prefetch=True, running__num_workers=4, use_mpi=True,
                    running__profiler_range=[1, 2], running__logging_dir="logs")  # fmt: skip
    for key, value in GPU.items():
        part, _, name = key.rpartition(".")
        (stored[part] if part else stored)[name] = value
    said = dict(translate(PeerFile("a file", stored), []).needless)
    assert set(said) == {
        *GPU, "data.shuffling_seed", "data.use_lazy_loading_prefetch", "running.num_workers", "use_mpi",
        "running.profiler_range", "running.logging_dir", "running.checkpoint_name",
    }  # fmt: skip
    assert all(said.values())


@pytest.mark.parametrize(
    ("changes", "parameter", "words"),
    [
        ({"running__dropout": 0.2}, "running.dropout", "task.model.dropout"),
        ({"use_ddp": True}, "use_ddp", "multiply it by the ranks"),
        ({"running__log_metrics_on_train_set": True}, "running.log_metrics_on_train_set", "data.test"),
        ({"running__early_stopping_epochs": 2, "running__early_stopping_threshold": 0.1},
         "running.early_stopping_threshold", "min_delta"),
        ({"running__final_validation_metric": "total_energy"}, "running.final_validation_metric", "band_energy"),
        ({"targets__restrict_targets": "absolute_values"}, "targets.restrict_targets", "clamp"),
        ({"data__input_rescaling_type": "robust"}, "data.input_rescaling_type", "not a scaling"),
        ({"running__learning_rte": 0.1}, "running.learning_rte", "misspelt"),
        ({"hyperparameters__hlist": [{"name": "learning_rate"}]}, "hyperparameters.hlist", "isoscale sweep"),
        ({"running__logger": "other"}, "running.logger", "observe.loggers"),
    ],
)  # fmt: skip
def test_what_cannot_be_translated_is_said_with_what_to_do(changes: dict[str, Any], parameter: str, words: str):
    assert words in remarked(**changes)[parameter]
    load_recipe(imported(**changes).values)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"network__nn_type": "lstm"}, "network.nn_type is 'lstm'"),
        ({"network__loss_function_type": "mae"}, "network.loss_function_type is 'mae'"),
        ({"running__optimizer": "RMSprop"}, "running.optimizer is 'RMSprop'"),
        ({"running__learning_rate_scheduler": "StepLR"}, "running.learning_rate_scheduler is 'StepLR'"),
        ({"targets__target_type": "DOS"}, "targets.target_type is 'DOS'"),
        ({"targets__ldos_gridsize": [11, 12]}, "several energy grids"),
        ({"network__layer_sizes": [91]}, "network.layer_sizes"),
        ({"data__snapshot_directories_list": [{"data": {}}]}, "data.snapshot_directories_list"),
    ],
)
def test_what_would_train_something_else_is_refused(changes: dict[str, Any], words: str):
    with pytest.raises(UserError, match=re.escape(words)):
        imported(**changes)


def test_no_value_of_a_parameter_ends_in_a_traceback():
    refused = taken = 0
    for key in DEFAULTS:
        for odd in (None, "x", [], {}, -1, 1.5, [None], [[1]], [{"data": None}]):
            part, _, name = key.rpartition(".")
            stored = values()
            (stored[part] if part else stored)[name] = copy.deepcopy(odd)
            try:
                load_recipe(translate(PeerFile("a file", stored), []).values)
                taken += 1
            except UserError:
                refused += 1
    assert min(refused, taken) > 50


def test_snapshots_of_several_folders_are_named_from_the_one_that_holds_them_all():
    listed = [snapshot("a", "tr", "/x/298K"), snapshot("a", "tr", "/x/933K"), snapshot("b", "va", "/x")]
    data = section("data", data__snapshot_directories_list=listed)
    assert (data["path"], data["train"], data["val"]) == ("/x", ["298K/a", "933K/a"], ["b"])
    moved = imported(folder="/y", data__snapshot_directories_list=listed[1:]).values["data"]
    assert (moved["path"], moved["train"], moved["val"]) == ("/y", ["a"], ["b"])


def test_openpmd_files_are_named_as_others():
    files = {"input_npy_file": "a.in.h5", "output_npy_file": "a.out.h5", "snapshot_type": "openpmd"}
    found = imported(folder=str(FILES), data__snapshot_directories_list=[snapshot("a", "tr", **files)])
    assert found.values["data"]["train"] == ["a"]
    assert not found.by_hand


def test_files_with_names_of_their_own_are_named_one_by_one():
    own = snapshot("a", "tr", output_npy_file="ldos.npy", calculation_output="/dft/pw.out")
    elsewhere = snapshot("b", "tr", output_npy_directory="/far")
    known = snapshot("c", "tr", calculation_output="/dft/c.out")
    data = section("data", data__snapshot_directories_list=[own, elsewhere, known])
    assert data["path"] == "Be2"
    assert data["train"] == [
        {"input": "a.in.npy", "target": "ldos.npy", "info": "/dft/pw.out"},
        {"input": "b.in.npy", "target": "/far/b.out.npy"},
        {"input": "c.in.npy", "target": "c.out.npy", "info": "/dft/c.out"},
    ]
    apart = section("data", data__snapshot_directories_list=[snapshot("a", "tr", "/x"), snapshot("a", "va", "y")])
    assert "path" not in apart
    assert apart["val"] == [{"input": "y/a.in.npy", "target": "y/a.out.npy"}]


def test_snapshots_that_are_not_there_or_not_readable_are_said():
    listed = [snapshot("a", "tr", input_npy_file="a.in.bp"), snapshot("b", "xx")]
    said = [remark.text for remark in imported(data__snapshot_directories_list=listed).by_hand]
    assert all(
        words in text for words, text in zip(["--data FOLDER", "save the snapshot as", "'xx'"], said, strict=True)
    )
    assert not imported(folder=str(FILES)).by_hand


def test_a_file_without_training_snapshots_takes_all_and_says_so():
    found = imported(folder=str(FILES), data__snapshot_directories_list=[snapshot("a", "te")])
    assert (found.values["data"]["train"], found.values["data"]["test"]) == (["*"], ["a"])
    assert "name there which ones" in dict(found.by_hand)["data.snapshot_directories_list"]


@pytest.mark.parametrize("role", ["tr", "va"])
def test_a_recipe_reads_back_as_it_was_written(role: str, tmp_path: Path):
    found = imported(running__learning_rte=1, data__snapshot_directories_list=[snapshot("a", role, "/x y/ü")])
    (tmp_path / "recipe.yaml").write_text(text := to_yaml(found), encoding="utf-8")
    assert load_recipe(tmp_path / "recipe.yaml").values == load_recipe(found.values).values
    assert "  lr: 0.001  # running.learning_rate\n" in text
    assert "      kind: minmax  # data.output_rescaling_type\n" in text
    assert "# - running.learning_rte: not known here" in text


def test_a_saved_run_is_read_from_its_folder_or_archive(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "run.zip", "w") as archive:
        archive.write(FILES / "be2.params.json", "run.params.json")
        archive.writestr("run.network.pth", "weights")
    assert read_parameters(tmp_path / "run.zip").values == values()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/run.params.json").write_text(json.dumps(values()))
    assert read_parameters(tmp_path / "folder").weights is None
    (tmp_path / "folder/run.network.pth").touch()
    found = read_parameters(tmp_path / "folder")
    assert (found.values, found.weights) == (values(), tmp_path / "folder/run.network.pth")
    (tmp_path / "folder/other.params.json").touch()
    with pytest.raises(UserError, match=r"found 2 of them, .*other\.params\.json.*: name one"):
        read_parameters(tmp_path / "folder")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("gone.json", None, "cannot read .*gone.json"),
        ("a.json", "{", "is not JSON"),
        ("a.json", "[]", "but a list"),
        ("a.zip", "text", "cannot read .*a.zip"),
        ("a.params.pkl", "text", "save_as_json"),
        ("folder", None, "expected one file NAME.params.json"),
    ],
)
def test_what_is_no_parameter_file_is_said(name: str, content: str | None, words: str, tmp_path: Path):
    (tmp_path / "folder").mkdir()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=words):
        read_parameters(tmp_path / name)


def test_a_recipe_of_another_kind_is_no_parameter_file():
    with pytest.raises(UserError, match="is not a parameter file of MALA"):
        translate(PeerFile("x.json", {"train": {"epochs": 3}}), [])


def test_the_page_has_a_row_for_every_parameter():
    named = set(re.findall(r"`([a-z0-9_.]+)`", PAGE.read_text(encoding="utf-8")))
    wanted = {key for key in DEFAULTS if key.rpartition(".")[0] in (*ABOUT_TRAINING, "targets")} - NOT_ABOUT_TRAINING
    wanted |= {"descriptors.descriptors_contain_xyz", "hyperparameters.hlist", "running.visualisation", *OLDER}
    assert sorted(wanted - named) == []


@pytest.mark.slow
def test_the_example_trains_to_what_it_reaches_there(shared: Path, tmp_path: Path):
    """There: 5.0e-3 on average over five seeds after five epochs, between 4.0e-3 and 7.2e-3."""
    recipe = imported(folder=str(shared / "data/electronic/Be2")).values
    run = train(tmp_path / "run", recipe)
    assert 3e-3 < run.metrics["val/loss"] < 8e-3
    assert run.metrics["val/band_energy"] > 0


def test_weights_of_there_are_a_start_here(shared: Path, tmp_path: Path):
    recipe = imported(folder=str(shared / "data/electronic/Be2"), network__layer_sizes=[91, 4, 11]).values
    saved = FILES / "be2-small.network.pth"
    run = train(tmp_path / "run", recipe, task__init_from=str(saved), optimizer__lr=1e-30, train__steps=1)
    given = torch.load(saved, weights_only=True)
    found = run.model().state_dict()
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], given[name]) for name in given)
