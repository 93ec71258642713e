"""Configurations of NERSC's U-Net training as recipes: what each says there is what is trained here."""

import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner, Result

import isoscale
from isoscale.cli.recipe.recipe import app
from isoscale.data.batches import BatchPlan
from isoscale.engine.optim.schedules import LearningRate
from isoscale.errors import UserError
from isoscale.recipe.importing.reading import import_file, to_yaml
from isoscale.recipe.load import load_recipe
from isoscale.recipe.loaded import LoadedRecipe
from isoscale.science.cosmology.nersc import KEYS, TAGS
from isoscale.science.importing import Imported
from tests.helpers import QUIET

PAGE = Path(__file__).parents[3] / "docs/how-to/coming-from/nersc.md"
FILE = """\
base: &all
  train_path: /boxes/large.h5
  val_path: /boxes/small.h5
  train_path_npy_data: /boxes/large_in.npy
  train_path_npy_label: /boxes/large_out.npy
  use_cache: None
  box_size: [1024, 512]
  data_size: 64
  data_loader_config: lowmem
  num_data_workers: 4
  N_out_channels: 5
  full_scale: True
  weight_init: {conv_init: normal, conv_scale: 0.02, conv_bias: 0.}
  lambda_rho: 0
  global_batch_size: 64
  base_batch_size: 64
  Nsamples: 65536
  Nsamples_val: 8192
  num_epochs: 10
  lr_schedule: {scaling: sqrt, start_lr: 2.E-4, end_lr: 0., warmup_steps: 128}
  enable_amp: False
  enable_apex: False
  enable_jit: False
  expdir: /somewhere

short: &few
  <<: *all
  Nsamples: 4096
  Nsamples_val: 512
  num_epochs: 4

fast: &fast
  data_loader_config: dali-lowmem
  enable_amp: True
  enable_apex: True
  enable_jit: True

short_opt:
  <<: [*fast, *few]

bs64_opt: &full
  <<: [*fast, *all]

bs256_opt: {<<: *full, global_batch_size: 256, num_epochs: 20}
bs512_test: {<<: *full, global_batch_size: 512}
bs512_opt: {<<: *full, global_batch_size: 512, num_epochs: 40}
bs2048_opt: {<<: *full, global_batch_size: 2048, num_epochs: 160}
bs8192_opt: {<<: *full, global_batch_size: 8192, num_epochs: 320}
"""
MERGED: dict[str, dict[str, Any]] = yaml.safe_load(FILE)
"""The same by another reader of YAML."""
NAMES = [name for name in MERGED if name != "fast"]
STEPS = {"base": 10240, "short": 256, "short_opt": 256, "bs64_opt": 10240, "bs256_opt": 5120, "bs512_test": 1280,
         "bs512_opt": 5120, "bs2048_opt": 5120, "bs8192_opt": 2560}  # fmt: skip
ONE = {"mine": {key: value for key, value in MERGED["bs256_opt"].items() if key != "weight_init"}}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "multi_gpu.yaml").write_text(FILE)
    return tmp_path


def imported(*words: str, config: str | None = "base", moved: Path | None = None) -> Imported:
    return import_file(Path("multi_gpu.yaml"), words, moved, config)


def changed(**changes: Any) -> Imported:
    """One configuration with other values; None leaves a key out."""
    values = {key: value for key, value in {**ONE["mine"], **changes}.items() if value is not None}
    Path("mine.yaml").write_text(yaml.safe_dump({"mine": values}))
    return import_file(Path("mine.yaml"), [], None)


def recipe_of(made: Imported) -> LoadedRecipe:
    Path("recipe.yaml").write_text(to_yaml(made))
    return load_recipe(Path("recipe.yaml"))


def num_steps(recipe: Any) -> int:
    plan = BatchPlan(recipe.data.samples_per_epoch, recipe.data.batch_size, recipe.data.drop_last)
    return plan.steps_per_epoch * recipe.train.epochs


def run(*words: str | Path) -> Result:
    result = CliRunner().invoke(app, ["import", *map(str, words)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_is_trained_as_it_is_meant(name: str):
    meant, loaded = MERGED[name], recipe_of(imported(config=name))
    values, recipe = loaded.values, loaded.recipe
    is_scaled = meant["global_batch_size"] > meant["base_batch_size"]
    assert num_steps(recipe) == meant["num_epochs"] * (meant["Nsamples"] // meant["global_batch_size"]) == STEPS[name]
    assert values["train"]["epochs"] == meant["num_epochs"]
    assert values["data"]["batch_size"] == meant["global_batch_size"]
    assert values["data"]["samples_per_epoch"] == meant["Nsamples"]
    assert values["data"]["eval_samples"] == meant["Nsamples_val"]
    assert values["data"]["crop"] == meant["data_size"]
    assert (values["data"]["train"], values["data"]["val"]) == (meant["train_path"], meant["val_path"])
    assert values["optimizer"]["name"] == "adam"
    assert values["optimizer"]["lr"] == meant["lr_schedule"]["start_lr"]
    assert values["schedule"]["scale"] == meant["lr_schedule"]["scaling"]
    assert values["schedule"]["base_batch_size"] == meant["base_batch_size"]
    assert values["schedule"]["warmup"] == (meant["lr_schedule"]["warmup_steps"] if is_scaled else 0)
    # flags of the script undo what a configuration asks for; here it is done
    assert values["train"]["precision"] == ("bf16" if meant["enable_amp"] else "auto")
    assert values["data"].get("dtype") == ("bfloat16" if meant["enable_amp"] else None)


@pytest.mark.parametrize("name", NAMES)
def test_the_preset_of_a_configuration_is_what_its_import_makes(name: str):
    def differing(values: dict[str, Any]) -> dict[str, Any]:
        model = {"out_channels": 5, "depth": 6, **values["task"]["model"]}
        data = {key: value for key, value in values["data"].items() if key not in ("train", "val")}
        schedule = {**values["schedule"], "end": values["schedule"]["end"] or 0}
        observe = {**values["observe"], "tensorboard_tags": {}}
        task = {"density_weight": 0, **values["task"], "model": model}
        return {**values, "task": task, "data": data, "schedule": schedule, "observe": observe}

    preset = load_recipe(f"cosmology/{name.replace('_', '-')}").values
    assert differing(recipe_of(imported(config=name)).values) == differing(preset)


def peers_rate(i: int, values: dict[str, Any], total: int) -> float:
    """The learning rate of step i, counted from 1, of the script."""
    rate, ratio = values["lr_schedule"], values["global_batch_size"] / values["base_batch_size"]
    peak = rate["start_lr"] * {"none": 1, "sqrt": math.sqrt(ratio), "linear": ratio}[rate["scaling"]]
    warmup = rate["warmup_steps"] if ratio > 1 and rate["scaling"] != "none" else 0
    if i < warmup:
        return float(peak * i / warmup)
    end = rate["end_lr"]
    return float(end + (peak - end) * (1 + math.cos(math.pi * (i - warmup) / total)) / 2)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {}) for name in NAMES),
        ("bs512_opt", {"scaling": "linear", "end_lr": 1e-6}),
        ("bs512_opt", {"scaling": "none"}),
        ("bs256_opt", {"warmup_steps": 0}),
        ("base", {"end_lr": 1e-5}),
    ],
)
def test_the_learning_rate_of_every_step_is_the_peers(name: str, changes: dict[str, Any]):
    values = {**MERGED[name], "lr_schedule": {**MERGED[name]["lr_schedule"], **changes}}
    words = [f"lr_schedule.{key}={value}" for key, value in changes.items()]
    recipe: Any = recipe_of(imported(*words, config=name)).recipe
    total, warmup = num_steps(recipe), recipe.schedule.warmup
    rate = LearningRate.make(recipe.schedule, recipe.optimizer.lr, recipe.data.batch_size, total)
    ours, theirs = ([f(i) for i in range(1, total + 1)] for f in (lambda i: rate(i - 1),
                                                                  lambda i: peers_rate(i, values, total)))  # fmt: skip
    assert ours[:warmup] == pytest.approx(theirs[:warmup], rel=1e-12)
    # There the cosine is as long as the whole training, here as long as what the warm-up leaves of it: its angles are
    # at most max(1, warmup) steps of that apart, and a cosine's slope is at most 1.
    most = math.pi / 2 * max(1, warmup) / total * (rate.peak - values["lr_schedule"]["end_lr"])
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= most * (1 + 1e-9)
    assert ours[-1] == pytest.approx(values["lr_schedule"]["end_lr"], abs=1e-15)
    assert max(ours) == pytest.approx(rate.peak)


def test_num_epochs_is_said_as_the_script_takes_it_or_as_a_key():
    for words in (["--num_epochs", "3"], ["num_epochs=3"]):
        run("multi_gpu.yaml", "--config", "bs512_opt", *words, "--out", "out.yaml")
        recipe = load_recipe(Path("out.yaml")).recipe
        assert (recipe.train.epochs, num_steps(recipe)) == (3, 384)
        assert "epochs: 3  # num_epochs\n" in Path("out.yaml").read_text()
        Path("out.yaml").unlink()


def test_keys_of_the_file_can_be_set_and_deleted():
    values = imported("lr_schedule.start_lr=1e-3", "amp_mode=fp16", "~Nsamples_val", config="bs512_opt").values
    assert values["optimizer"]["lr"] == 1e-3
    assert values["train"]["precision"] == "fp16" and "dtype" not in values["data"]
    assert "eval_samples" not in values["data"]
    with pytest.raises(UserError, match=r'command line: num_epoch: unknown key; did you mean "num_epochs"\?'):
        imported("num_epoch=3")
    with pytest.raises(UserError, match=r"train\.epochs=3 is not a key of multi_gpu.yaml: put it into the recipe"):
        imported("train.epochs=3")


def test_a_configuration_has_to_be_named_where_there_are_several():
    with pytest.raises(UserError, match=r"holds 10 configurations: say which with --config NAME; there is base, short"):
        imported(config=None)
    with pytest.raises(UserError, match=r'no configuration "bs512-opt"; did you mean "bs512_opt"\? there is base, sho'):
        imported(config="bs512-opt")
    with pytest.raises(UserError, match=r'no configuration "zzz"; there is base, short, fast'):
        imported(config="zzz")
    assert changed().values["data"]["batch_size"] == 256, "a file with one needs no name"


def test_a_file_of_another_program_has_no_configurations():
    mala = Path(__file__).parents[1] / "electronic/mala/files/be2.params.json"
    with pytest.raises(UserError, match="is a parameter file of MALA, which has no configurations to choose from"):
        run(mala, "--config", "base")
    with pytest.raises(UserError, match="num_epochs=3 can only stand beside"):
        run(mala, "--num_epochs", "3")


@pytest.mark.parametrize("words", [(), ("num_epochs=3",)])
def test_such_a_file_is_no_recipe_and_says_what_to_type(words: tuple[str, ...]):
    command = "isoscale recipe import multi_gpu.yaml --config NAME --out RECIPE.yaml"
    with pytest.raises(UserError, match=rf"\(base, short, .*bs8192_opt\): {command}"):
        load_recipe(Path("multi_gpu.yaml"), words)
    with pytest.raises(UserError, match="a configuration file of NERSC's U-Net training; `isoscale recipe import`"):
        load_recipe({"extends": "multi_gpu.yaml"})


def test_every_value_is_said_with_its_key_and_what_is_not_needed_with_its_reason():
    made = imported(config="bs512_opt")
    text = to_yaml(made)
    assert text.startswith("# From multi_gpu.yaml, bs512_opt, of NERSC's U-Net training.")
    for line in ("batch_size: 512  # global_batch_size", "precision: bf16  # enable_amp", "name: adam  # train.py",
                 "scale: sqrt  # lr_schedule.scaling", "depth: 6  # full_scale"):  # fmt: skip
        assert line in text
    notes = dict(made.needless)
    assert "captured" in notes["enable_jit"] and "fused" in notes["enable_apex"] and "--run DIR" in notes["expdir"]
    assert "train_path_npy_data, train_path_npy_label" in notes and "train.precision=fp16" in notes["enable_amp"]
    assert "0.15% of its peak" in notes["lr_schedule.warmup_steps"]
    assert "a batch of 64 is not larger than 64" in dict(imported().needless)["lr_schedule.warmup_steps"]
    assert not {"enable_jit", "enable_apex", "enable_amp"} & dict(imported().needless).keys(), "nobody asked for them"


def test_boxes_are_looked_for_where_they_are_now(folder: Path):
    remarks = dict(imported().by_hand)
    assert remarks.keys() == {"train_path, val_path"}
    assert "no /boxes/large.h5 and no /boxes/small.h5 here" in remarks["train_path, val_path"]
    for name in ("large", "small"):
        (folder / f"{name}.h5").touch()
    moved = imported(moved=folder)
    assert moved.values["data"]["train"] == str(folder / "large.h5") and not moved.by_hand
    cached = imported(f"use_cache={folder}")
    assert cached.values["data"]["val"] == str(folder / "small.h5") and not cached.by_hand


def by_hand(**changes: Any) -> dict[str, str]:
    return {key: text for key, text in changed(**changes).by_hand if not key.endswith("_path")}


def test_what_cannot_be_had_is_left_to_be_done_by_hand():
    assert by_hand(weight_init={"conv_init": "normal", "conv_scale": 0.02, "conv_bias": 0.0}) == {}
    weights = by_hand(weight_init={"conv_scale": 0.1, "conv_bias": None})
    assert "a network of your own" in weights["weight_init.conv_scale, weight_init.conv_bias"]
    assert "simulated_boxes" in by_hand(data_loader_config="synthetic")["data_loader_config"]
    assert "all ranks together" in by_hand(local_batch_size=16)["local_batch_size"]
    assert 'did you mean "base_batch_size"?' in by_hand(base_batchsize=64)["base_batchsize"]
    assert by_hand(gradient_color=3)["gradient_color"] == "not known here; the script takes any key, and may read it"


def test_what_is_there_in_another_way_is_set():
    made = changed(full_scale=False, lambda_rho=0.01, N_out_channels=1)
    assert made.values["task"] == {"class": "field_regression", "density_weight": 0.01,
                                   "model": {"class": "unet3d", "depth": 5, "out_channels": 1}}  # fmt: skip
    assert "a fifth" in dict(made.needless)["lambda_rho"]
    assert "the rest is left out" in dict(changed(Nsamples=1000).needless)["Nsamples"]
    bf16 = changed(enable_amp=None, amp_mode="bf16").values
    assert (bf16["train"]["precision"], bf16["data"]["dtype"]) == ("bf16", "bfloat16")
    assert "precision" not in changed(enable_amp=None, amp_mode="none").values["train"]
    plain = changed(lr_schedule={"start_lr": 1e-4}, base_batch_size=None).values
    assert plain["schedule"] == {"name": "cosine"}, "as the script's function does where a file says no more"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"num_epochs": "ten"},
            r'mine\.yaml, mine:\d+: num_epochs: expected a whole number, found "ten"|num_epochs: exp',
        ),
        (
            {"num_epochs": None, "num_epoch": 4},
            r'num_epochs: needed here(.|\n)*num_epoch: unknown key; did you mean "nu',
        ),
        ({"train_path": None}, "train_path: needed here, but missing: the HDF5 file with Nbody and Hydro"),
        ({"lr_schedule": 1e-3}, "lr_schedule: expected a section of keys and values, found 0.001"),
        (
            {"lr_schedule": {"start_lr": 1, "scaling": "cubic"}},
            '"cubic" is not known there, nor here; known is none, s',
        ),
        ({"base_batch_size": None}, r"base_batch_size: needed here, but missing: lr_schedule\.scaling is sqrt"),
        ({"data_loader_config": "dali"}, "known is inmem, lowmem, dali-lowmem, synthetic"),
        ({"amp_mode": "fp8"}, "known is none, fp16, bf16"),
    ],
)
def test_what_a_file_cannot_say_is_an_error(changes: dict[str, Any], words: str):
    with pytest.raises(UserError, match=words):
        changed(**changes)


def test_the_page_speaks_of_every_key():
    page = PAGE.read_text(encoding="utf-8")
    assert not sorted(key for key in KEYS if f"`{key}`" not in page)


def test_a_training_draws_the_curves_of_the_script(folder: Path):
    for name in ("large", "small"):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            for dataset, fields in (("Nbody", 4), ("Hydro", 5)):
                noise = np.random.default_rng(0).normal(0, 0.1, (fields, 12, 12, 12))
                file.create_dataset(dataset, data=noise.astype("f4"))
    words = ("global_batch_size=4", "base_batch_size=1", "Nsamples=18", "Nsamples_val=4", "num_epochs=2",
             "lr_schedule.warmup_steps=3", "data_size=8")  # fmt: skip
    made = imported(*words, moved=folder)
    small = {"task.model.width": 2, "task.model.depth": 3, "observe.every": 1, "observe.tensorboard": 1}
    trained = isoscale.train(made.values, run=folder / "run", **{**QUIET, **small, "observe.level": "error"})
    assert [step for step, _ in trained.history("lr")] == list(range(1, 9)), "18 samples are 4 batches of 4"
    peak = 2e-4 * math.sqrt(4)
    assert [rate for _, rate in trained.history("lr")][:4] == pytest.approx([peak / 3, peak * 2 / 3, peak, peak])
    events = EventAccumulator(str(folder / "run/tensorboard/tagged")).Reload()
    curves = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert sorted(curves) == sorted(TAGS.values())
    for name, tag in TAGS.items():
        assert curves[tag] == pytest.approx([value for _, value in trained.history(name)])
    assert [len(curves[tag]) for tag in ("Loss/train", "Loss/valid", "Learning Rate")] == [2, 2, 8]
    assert all(rate > 0 for rate in curves["Avg iters per sec"])
