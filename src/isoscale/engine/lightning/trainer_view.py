"""What a LightningModule and callbacks see as their trainer."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from isoscale.errors import UserError
from isoscale.parallel.collectives import ALONE, Ranks


class TrainerView:
    """What a LightningModule sees as `self.trainer`."""

    accumulate_grad_batches = 1
    """A batch is the batch of one update here, whatever the micro-batches are."""
    sanity_checking = True
    """Until training begins: what runs before it is a rehearsal of the evaluation."""
    stage = "train"
    """What is at work: train, val, test or predict."""
    logger = log_dir = datamodule = None
    min_epochs: int | None = None
    min_steps: int | None = None
    loggers: tuple[Any, ...] = ()

    def __init__(
        self, where: Callable[[], tuple[int, int]], num_steps: int, steps_per_epoch: int, ranks: Ranks = ALONE
    ) -> None:
        """`where` tells (epoch, step) between launches."""
        self._where = where
        self.ranks = ranks
        self.is_global_zero = ranks.is_main
        self.world_size, self.global_rank, self.local_rank = ranks.world_size, ranks.rank, ranks.local_rank
        self.num_nodes = len(set(ranks.hosts))
        self.num_devices = ranks.world_size // self.num_nodes
        self.node_rank = list(dict.fromkeys(ranks.hosts)).index(ranks.hosts[ranks.rank])
        self.max_steps = self.estimated_stepping_batches = num_steps
        self.num_training_batches = steps_per_epoch
        self.max_epochs = -(-num_steps // steps_per_epoch)
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[Any] = []
        self.callback_metrics: dict[str, Tensor] = {}
        self.lightning_module: Any = None
        self.updates: Callable[[], int] | None = None
        """Counts the updates of manual optimisation, of which a batch may have several."""
        self.read: set[str] = set()
        """What somebody has asked for that changes from step to step."""
        self._finished: int | None = None
        self._ahead = False

    def begin_epoch(self) -> None:
        """The next step belongs to a new epoch."""
        self._ahead = True

    def finish(self, step: int) -> None:
        """So many steps are finished."""
        self._finished, self._ahead = step, False

    @property
    def _step(self) -> int:
        return self._where()[1] if self._finished is None else self._finished

    @property
    def current_epoch(self) -> int:
        """The running epoch, from 0; it lasts until the next one begins."""
        self.read.add("current_epoch")
        step = self._step
        return (step if self._ahead else max(0, step - 1)) // self.num_training_batches

    @property
    def global_step(self) -> int:
        """Finished optimizer steps."""
        self.read.add("global_step")
        return self._step if self.updates is None else self.updates()

    @property
    def training(self) -> bool:
        """Whether training batches are at work."""
        return self.stage == "train"

    @property
    def validating(self) -> bool:
        """Whether validation batches are at work."""
        return self.stage == "val"

    @property
    def testing(self) -> bool:
        """Whether test batches are at work."""
        return self.stage == "test"

    @property
    def predicting(self) -> bool:
        """Whether predictions are made."""
        return self.stage == "predict"

    @property
    def should_stop(self) -> bool:
        """Whether training was asked to end."""
        return False

    @should_stop.setter
    def should_stop(self, wanted: bool) -> None:
        if wanted:
            raise UserError("trainer.should_stop is not supported: use train.early_stopping, train.steps or a signal")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"self.trainer has no {name!r} under isoscale")
