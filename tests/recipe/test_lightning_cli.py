"""A project of LightningCLI trains after one command that makes a recipe of its config."""

from pathlib import Path

import pytest
import yaml

from isoscale.errors import UserError
from isoscale.recipe.importing.reading import import_file, to_yaml
from isoscale.recipe.load import load_recipe

CONFIG = """\
# lightning.pytorch==2.6.6
seed_everything: 7
trainer:
  accelerator: cpu
  max_epochs: 3
  gradient_clip_val: 0.5
  logger: true
  enable_progress_bar: null
  callbacks:
    - class_path: EarlyStopping
      init_args: {monitor: val_loss, patience: 2}
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {monitor: val_loss, mode: min}
model:
  class_path: project.Model
  init_args:
    width: 12
    head: {class_path: torch.nn.Linear, init_args: {in_features: 12, out_features: 2}}
data:
  class_path: project.Data
  init_args: {batch_size: 16, folder: here}
optimizer:
  class_path: torch.optim.AdamW
  init_args: {lr: 0.01, weight_decay: 0.1}
ckpt_path: null
"""


def written(folder: Path, text: str = CONFIG) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_a_config_becomes_a_recipe(tmp_path: Path):
    imported = import_file(written(tmp_path), [], None)
    recipe = load_recipe(yaml.safe_load(to_yaml(imported))).recipe
    assert (recipe.seed, recipe.train.epochs, recipe.train.clip, recipe.train.device) == (7, 3, 0.5, "cpu")
    assert recipe.task.class_ == "project.Model"
    assert recipe.task.arguments == {
        "width": 12, "head": {"class": "torch.nn.Linear", "in_features": 12, "out_features": 2}
    }  # fmt: skip
    assert (recipe.data.init_args, recipe.data.arguments, recipe.data.batch_size) == (
        {"batch_size": 16}, {"folder": "here"}, 128,
    )  # fmt: skip
    assert (recipe.optimizer.class_, recipe.optimizer.lr) == ("torch.optim.AdamW", 0.01)
    assert recipe.train.callbacks[0] == {
        "class": "lightning.pytorch.callbacks.EarlyStopping", "monitor": "val_loss", "patience": 2
    }  # fmt: skip
    assert recipe.checkpoint.monitor == "val_loss"
    assert not imported.by_hand


def test_a_class_that_only_the_script_says_is_asked_for(tmp_path: Path):
    path = written(tmp_path, "trainer: {max_steps: 4}\nmodel: {width: 3}\ndata: {class_path: project.Data}\n")
    with pytest.raises(UserError, match=r"model\.class_path=main\.Model"):
        import_file(path, [], None)
    values = import_file(path, ["model.class_path=main.Model", "trainer.max_steps=9"], None).values
    assert values["task"] == {"class": "main.Model", "width": 3}
    assert values["train"] == {"steps": 9, "epochs": None}


def test_what_a_recipe_cannot_say_is_refused_or_left_to_do(tmp_path: Path):
    scheduler = "lr_scheduler: {class_path: torch.optim.lr_scheduler.StepLR, init_args: {step_size: 2}}\n"
    imported = import_file(written(tmp_path, CONFIG + scheduler + "my_argument: 3\n"), [], None)
    assert [remark.parameter for remark in imported.by_hand] == ["my_argument", "lr_scheduler"]
    with pytest.raises(UserError, match="strategy='fsdp'"):
        import_file(written(tmp_path, CONFIG), ["trainer.strategy=fsdp"], None)


def test_a_plateau_of_the_config_is_the_schedule_of_the_recipe(tmp_path: Path):
    arguments = {"monitor": "val_loss", "factor": 0.5}
    plateau = {"class_path": "lightning.pytorch.cli.ReduceLROnPlateau", "init_args": arguments}
    path = written(tmp_path, CONFIG + yaml.safe_dump({"lr_scheduler": plateau}))
    assert import_file(path, [], None).values["schedule"] == {"name": "plateau", "monitor": "val_loss", "gamma": 0.5}


def test_keys_of_the_data_section_that_stay_in_init_args_are_all_of_them():
    from isoscale.data.config import Data
    from isoscale.recipe.formats.tree import DATA_KEYS

    assert {*DATA_KEYS} == {*Data.model_fields} - {"class_", "init_args"}
