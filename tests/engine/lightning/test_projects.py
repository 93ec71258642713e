"""Whole projects of Lightning taken over by what the page on coming from Lightning says, and nothing else."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml

import isoscale
from isoscale.data.hashing import derive_key

PROJECTS = Path(__file__).parent / "projects"


def copied(name: str, folder: Path, *changes: tuple[str, str, str]) -> Path:
    """A copy of a project, with some words of its files replaced: (file, old, new)."""
    shutil.copytree(PROJECTS / name, folder)
    for file, old, new in changes:
        text = (folder / file).read_text()
        assert text.count(old) == 1, f"{file} has {old!r} {text.count(old)} times"
        (folder / file).write_text(text.replace(old, new))
    return folder


def called(folder: Path, *words: str) -> str:
    """What a command prints, in a folder, with one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def assert_same_files(ours: Path, theirs: Path, numbers: str) -> None:
    """The same weights to the bit, and the same numbers in a JSON file."""
    weights, expected = (torch.load(folder / "weights.pt", weights_only=True) for folder in (ours, theirs))
    assert weights.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(weights[name], expected[name])] == []
    found, wanted = (json.loads((folder / numbers).read_text()) for folder in (ours, theirs))
    assert {name: found.get(name) for name in wanted} == pytest.approx(wanted, rel=1e-5)


@pytest.mark.full
def test_a_script_is_taken_over_by_its_trainer(tmp_path: Path) -> None:
    theirs = copied("script", tmp_path / "lightning")
    ours = copied(
        "script", tmp_path / "isoscale",
        ("train.py", "import lightning as L\n", "import isoscale\nimport lightning as L\n"),
        ("train.py", "L.Trainer(", "isoscale.Trainer("),
    )  # fmt: skip
    for folder in (theirs, ours):
        called(folder, sys.executable, "train.py", "--lr", "0.02")
    assert_same_files(ours, theirs, "results.json")


@pytest.mark.full
def test_a_template_is_taken_over_by_the_target_of_its_trainer(tmp_path: Path) -> None:
    theirs = copied("template", tmp_path / "lightning")
    ours = copied(
        "template", tmp_path / "isoscale",
        ("configs/trainer/default.yaml", "_target_: lightning.pytorch.trainer.Trainer", "_target_: isoscale.Trainer"),
    )  # fmt: skip
    for folder in (theirs, ours):
        called(folder, sys.executable, "src/train.py", "trainer.max_epochs=3")
    assert_same_files(ours, theirs, "metrics.json")


@pytest.mark.full
def test_a_configuration_of_the_command_line_is_taken_over_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = copied("cli", tmp_path / "lightning"), copied("cli", tmp_path / "isoscale")
    isoscale_command = (sys.executable, "-m", "isoscale")
    called(ours, *isoscale_command, "recipe", "import", "config.yaml", "--out", "imported.yaml")
    called(ours, *isoscale_command, "train", "imported.yaml", "--run", "run")
    run = isoscale.Run.load(ours / "run")
    monkeypatch.chdir(theirs)
    monkeypatch.syspath_prepend(theirs)
    module, trainer = _as_the_command_line_does(yaml.safe_load(Path("config.yaml").read_text()))
    weights = run.model("last").state_dict()
    assert [name for name, value in module.state_dict().items() if not torch.equal(value, weights[name])] == []
    assert run.summary()["step"] == trainer.global_step
    assert run.metrics["val_loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]), rel=1e-5)
    best = [torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True) for folder in (ours, theirs)]
    assert best[0]["global_step"] == best[1]["global_step"]
    assert all(torch.equal(value, best[0]["state_dict"][name]) for name, value in best[1]["state_dict"].items())


def _as_the_command_line_does(config: dict[str, Any]) -> tuple[Any, pl.Trainer]:
    """Train as LightningCLI does, without the library that it needs to read its arguments."""
    from project import Regression, Sines

    torch.set_num_threads(1)
    # isoscale's rule from the seed to initial weights, so that both begin with the same ones
    torch.manual_seed(derive_key(config["seed_everything"], "initial weights")[0])
    options = config["trainer"]
    for place, each in enumerate(options["callbacks"]):
        callback = getattr(pl.callbacks, each["class_path"].rsplit(".", 1)[1])
        options["callbacks"][place] = callback(**each["init_args"])
    trainer = pl.Trainer(**options, enable_model_summary=False, logger=False)
    module, data = Regression(**config["model"]["init_args"]), Sines(**config["data"]["init_args"])
    trainer.fit(module, data)
    return module, trainer
