"""Train by the configuration: `python src/train.py trainer.max_epochs=2`."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import lightning as L  # noqa: E402
import torch  # noqa: E402
from src.utils.config import compose, instantiate  # noqa: E402


def train(config):
    L.seed_everything(config["seed"], workers=True)
    datamodule = instantiate(config["data"])
    model = instantiate(config["model"])
    callbacks = [instantiate(each) for each in config["callbacks"].values()]
    trainer = instantiate(config["trainer"], callbacks=callbacks, logger=False)
    if config["train"]:
        trainer.fit(model=model, datamodule=datamodule, ckpt_path=config.get("ckpt_path"))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if config["test"]:
        ckpt_path = trainer.checkpoint_callback.best_model_path or None
        trainer.test(model=model, datamodule=datamodule, ckpt_path=ckpt_path, weights_only=False)
        metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}
    Path("metrics.json").write_text(json.dumps(metrics))
    last = torch.load("checkpoints/last.ckpt", weights_only=False)["state_dict"]
    torch.save(last, "weights.pt")


if __name__ == "__main__":
    train(compose(ROOT / "configs", sys.argv[1:]))
