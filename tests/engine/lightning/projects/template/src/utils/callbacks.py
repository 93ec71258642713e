from typing import Any

from lightning.pytorch.callbacks import Callback


class LogWeightNorm(Callback):
    """Logs the norm of the weights at the end of every epoch."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("weights/norm", sum(p.detach().norm() for p in pl_module.net.parameters()))
