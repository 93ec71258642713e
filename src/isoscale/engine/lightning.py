"""LightningModules and LightningDataModules as they are, by duck typing: `lightning` itself is never imported.

A module finds what it expects: `self.log`, `self.trainer` with the common attributes, `self.optimizers()` and
`self.manual_backward` for manual optimisation. Data loaders give their dataset, collate function and batch size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from isoscale.data.hashing import derive_key
from isoscale.data.sources import Source, as_source
from isoscale.errors import UserError

EPOCH_HOOKS = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
)
_UNSUPPORTED_HOOKS = (
    "backward",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_after_backward",
    "on_before_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_validation_batch_end",
    "on_validation_batch_start",
    "optimizer_step",
    "optimizer_zero_grad",
    "transfer_batch_to_device",
)


def is_lightning_module(task: Any) -> bool:
    """Whether this is a LightningModule."""
    return any(cls.__name__ == "LightningModule" for cls in type(task).__mro__)


def is_data_module(data: Any) -> bool:
    """Whether this gives data loaders, as a LightningDataModule does."""
    return hasattr(data, "train_dataloader") or isinstance(data, DataLoader)


class TrainerView:
    """What a LightningModule sees as `self.trainer`."""

    is_global_zero = True
    world_size = num_devices = num_nodes = 1
    global_rank = local_rank = 0
    sanity_checking = False
    logger = None
    loggers: tuple[Any, ...] = ()

    def __init__(self, where: Callable[[], tuple[int, int]], num_steps: int, steps_per_epoch: int) -> None:
        """`where` tells (epoch, step)."""
        self._where = where
        self.max_steps = self.estimated_stepping_batches = num_steps
        self.num_training_batches = steps_per_epoch
        self.max_epochs = -(-num_steps // steps_per_epoch)
        self.optimizers: list[Optimizer] = []
        self.callback_metrics: dict[str, Any] = {}
        self.training = self.validating = self.testing = False

    @property
    def current_epoch(self) -> int:
        """The running epoch, from 0."""
        return self._where()[0]

    @property
    def global_step(self) -> int:
        """Finished optimizer steps."""
        return self._where()[1]


def attach(task: Any, view: TrainerView) -> None:
    """Let a LightningModule find its trainer; refuse what would silently not be called."""
    overridden = [name for name in _UNSUPPORTED_HOOKS if _overrides(task, name)]
    if overridden:
        raise UserError(
            f"{type(task).__name__} overrides {', '.join(overridden)}, which isoscale does not call; "
            "move that code into training_step, or set automatic_optimization = False and update there"
        )
    task._trainer = view
    _set(task, "optimizers", lambda use_pl_optimizer=True: _one_or_all(view.optimizers))
    _set(task, "lr_schedulers", lambda: _one_or_all(getattr(view, "schedulers", [])))
    _set(task, "manual_backward", lambda loss, *arguments, **options: loss.backward(*arguments, **options))
    _set(task, "toggle_optimizer", lambda optimizer: _toggle(task, optimizer))
    _set(task, "untoggle_optimizer", lambda optimizer: _toggle(task, None))
    _set(task, "clip_gradients", _clip)
    _set(task, "all_gather", lambda data, *arguments, **options: data)
    _set(task, "print", print)


def detach(task: Any) -> None:
    """Take back what `attach` and the stages set on the instance."""
    for name in (
        "log", "log_dict", "optimizers", "lr_schedulers", "manual_backward", "toggle_optimizer", "untoggle_optimizer",
        "clip_gradients", "all_gather", "print",
    ):  # fmt: skip
        task.__dict__.pop(name, None)
    if "_trainer" in task.__dict__:
        task._trainer = None


def _overrides(task: Any, name: str) -> bool:
    """Whether the user's class, rather than the framework's, defines a method."""
    owner = next((cls for cls in type(task).__mro__ if name in vars(cls)), None)
    return owner is not None and not owner.__module__.startswith(("lightning", "pytorch_lightning"))


def _set(task: Any, name: str, value: Any) -> None:
    object.__setattr__(task, name, value)


def _one_or_all(items: list[Any]) -> Any:
    return items[0] if len(items) == 1 else list(items)


def _toggle(task: nn.Module, optimizer: Optimizer | None) -> None:
    """Let gradients flow to one optimizer's parameters only, or to all again."""
    if optimizer is None:
        for parameter, needed in task.__dict__.pop("_toggled", {}).items():
            parameter.requires_grad = needed
        return
    task.__dict__["_toggled"] = {parameter: parameter.requires_grad for parameter in task.parameters()}
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for parameter, needed in task.__dict__["_toggled"].items():
        parameter.requires_grad = needed and id(parameter) in own


def _clip(
    optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if gradient_clip_val is None:
        return
    if gradient_clip_algorithm == "value":
        nn.utils.clip_grad_value_(parameters, gradient_clip_val)
    else:
        nn.utils.clip_grad_norm_(parameters, gradient_clip_val)


class Configured:
    """What `configure_optimizers` returned, in one form."""

    def __init__(self, returned: Any) -> None:
        """Accepts every form that Lightning does."""
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[dict[str, Any]] = []
        self._take(returned)

    def _take(self, returned: Any) -> None:
        if isinstance(returned, Optimizer):
            self.optimizers.append(returned)
        elif isinstance(returned, dict):
            self.optimizers.append(returned["optimizer"])
            if returned.get("lr_scheduler") is not None:
                self._schedule(returned["lr_scheduler"])
        elif isinstance(returned, tuple | list) and len(returned) == 2 and isinstance(returned[1], list | tuple):
            for optimizer in returned[0]:
                self._take(optimizer)
            for scheduler in returned[1]:
                self._schedule(scheduler)
        elif isinstance(returned, tuple | list):
            for entry in returned:
                self._take(entry)
        else:
            raise UserError(f"configure_optimizers returned {type(returned).__name__}, which is no optimizer")

    def _schedule(self, scheduler: Any) -> None:
        entry = dict(scheduler) if isinstance(scheduler, dict) else {"scheduler": scheduler}
        self.schedulers.append({"interval": "epoch", "frequency": 1, "monitor": "val_loss", **entry})

    def after_step(self, step: int) -> None:
        """Move the schedulers that count steps."""
        for entry in self.schedulers:
            if entry["interval"] == "step" and step % entry["frequency"] == 0:
                entry["scheduler"].step()

    def after_epoch(self, epoch: int, values: dict[str, float]) -> None:
        """Move the schedulers that count epochs; plateau ones by the metric they watch."""
        for entry in self.schedulers:
            if entry["interval"] != "epoch" or epoch % entry["frequency"]:
                continue
            if isinstance(entry["scheduler"], torch.optim.lr_scheduler.ReduceLROnPlateau):
                if entry["monitor"] not in values:
                    raise UserError(f"the scheduler watches {entry['monitor']!r}, but there is: {', '.join(values)}")
                entry["scheduler"].step(values[entry["monitor"]])
            else:
                entry["scheduler"].step()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The schedulers' and param groups' numbers."""
        groups = [[_numbers(group) for group in optimizer.param_groups] for optimizer in self.optimizers]
        return {}, {
            "schedulers": [_numbers(entry["scheduler"].state_dict()) for entry in self.schedulers],
            "groups": groups,
        }

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take over a state."""
        for entry, numbers in zip(self.schedulers, values["schedulers"], strict=True):
            entry["scheduler"].load_state_dict({**entry["scheduler"].state_dict(), **numbers})
        for optimizer, groups in zip(self.optimizers, values["groups"], strict=True):
            for group, numbers in zip(optimizer.param_groups, groups, strict=True):
                group.update(numbers)


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """The entries that JSON can hold."""
    plain = (int, float, str, bool, type(None))
    return {
        key: value
        for key, value in values.items()
        if isinstance(value, plain) or (isinstance(value, list) and all(isinstance(entry, plain) for entry in value))
    }


class SamplerOrder:
    """The order of a custom sampler, drawn anew each epoch with a seed of its own, so that it can be drawn again."""

    def __init__(self, sampler: Any, seed: int) -> None:
        """The order that `sampler` gives."""
        self._sampler = sampler
        self._seed = seed
        self._epoch = -1
        self._indices = torch.empty(0, dtype=torch.int64)
        self.num_samples = len(sampler)

    def indices(self, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Sample indices for places from `start`, which may span epochs."""
        found = []
        while count > 0:
            epoch, position = divmod(start, self.num_samples)
            piece = self._of_epoch(epoch)[position : position + count]
            found.append(piece)
            start, count = start + len(piece), count - len(piece)
        return torch.cat(found).to(device)

    def _of_epoch(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(derive_key(self._seed, "sampler", epoch)[0])
                self._indices = torch.tensor(list(self._sampler), dtype=torch.int64)
            if len(self._indices) != self.num_samples:
                raise UserError(f"the sampler says it has {self.num_samples} samples and gave {len(self._indices)}")
            self._epoch = epoch
        return self._indices


class Loaded:
    """A data loader taken apart: its source, batch size and order."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        """Take a loader apart; what cannot keep the laws is refused in words."""
        if isinstance(loader.dataset, IterableDataset):
            raise UserError(
                "an IterableDataset has no places to address, so that order, restart and rank count cannot be kept; "
                "give a map-style dataset (with __len__ and __getitem__)"
            )
        if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
            raise UserError("a custom batch_sampler is not supported: give the loader a batch_size and a sampler")
        self.source: Source = as_source(loader.dataset, loader.collate_fn)
        self.batch_size = int(loader.batch_size)
        self.drop_last = loader.drop_last
        self.shuffle = isinstance(loader.sampler, RandomSampler)
        plain = isinstance(loader.sampler, SequentialSampler) or _is_plain_random(loader.sampler)
        self.sampler = None if plain else loader.sampler


def _is_plain_random(sampler: Any) -> bool:
    return type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source)


class LoadedData:
    """The loaders of a LightningDataModule, of a module's own methods, or given one by one."""

    def __init__(self, data: Any) -> None:
        """Prepare and set up a data module, and take its loaders apart."""
        if isinstance(data, DataLoader):
            self._loaders = {"train": Loaded(data)}
            return
        for name, arguments in (("prepare_data", ()), ("setup", ("fit",)), ("setup", ("test",))):
            if callable(getattr(data, name, None)):
                getattr(data, name)(*arguments)
        methods = {
            "train": "train_dataloader",
            "val": "val_dataloader",
            "test": "test_dataloader",
            "predict": "predict_dataloader",
        }
        found = {role: _loader(data, method) for role, method in methods.items()}
        self._loaders = {role: Loaded(loader) for role, loader in found.items() if loader is not None}

    def role(self, name: str) -> Loaded | None:
        """The loader of a role, if there is one."""
        return self._loaders.get(name)


def _loader(data: Any, method: str) -> Any:
    """Call a loader method, unless it is the framework's own, which only raises."""
    owner = next((cls for cls in type(data).__mro__ if method in vars(cls)), None)
    if owner is None or owner.__module__.startswith(("lightning.pytorch.core", "pytorch_lightning.core")):
        return None
    loader = getattr(data, method)()
    if isinstance(loader, list | tuple):
        if len(loader) > 1:
            raise UserError(f"{method} gives {len(loader)} loaders; isoscale takes one for each role")
        loader = loader[0] if loader else None
    return loader
