"""Hooks around a batch (its start and end, what follows its transfer), for the tasks that define them."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from isoscale.engine.lightning.module import is_lightning_module
from isoscale.engine.lightning.overrides import overrides
from isoscale.engine.lightning.transfer import Transfer
from isoscale.errors import UserError

_STAGES = {"train": "train", "val": "validation", "test": "test", "predict": "predict"}


def around(
    task: Any, stage: str, method: Callable[..., Any], transfer: Transfer | None = None,
    loader: Callable[[], int | None] = lambda: None,
) -> Callable[..., Any]:  # fmt: skip
    """The task's step method with the hooks around it that the task defines: itself, if there are none.

    `transfer` brings a batch to the device; `loader` tells the number of the loader, where there are several.
    """
    names = [f"on_{_STAGES[stage]}_batch_{end}" for end in ("start", "end")]
    called = _with_index(task, method)
    if stage != "train":
        called = _with_loader(task, called, method, 2, loader)
    if transfer is None and not any(overrides(task, name) for name in names):
        return called
    start, end = (getattr(task, name) if overrides(task, name) else None for name in names)
    if stage != "train":
        start = None if start is None else _with_loader(task, start, start, 2, loader)
        end = None if end is None else _with_loader(task, end, end, 3, loader)
    return AroundBatch(called, transfer, start, end, stage, loader)


def _with_index(task: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    """A step method that takes the batch alone is called with it alone."""
    if not is_lightning_module(task):
        return method
    parameters = list(inspect.signature(method).parameters.values())
    if any(parameter.name == "dataloader_iter" for parameter in parameters):
        raise UserError(f"{method.__name__}(dataloader_iter) reads its loader itself; take (batch, batch_idx) instead")
    if len(parameters) == 1 and parameters[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        return lambda batch, batch_idx: method(batch)
    return method


class SkipEpoch(Exception):
    """`on_train_batch_start` has returned -1: the rest of the epoch is skipped, this batch included."""


def _with_loader(
    task: Any, called: Callable[..., Any], method: Callable[..., Any], place: int, loader: Callable[[], int | None]
) -> Callable[..., Any]:
    """A step method or hook of an evaluation that is told the number of the loader, where there are several.

    `place` is that of the argument `dataloader_idx` in `method`.
    """
    parameters = list(inspect.signature(method).parameters.values())
    takes_any = any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters)
    takes = takes_any or len(parameters) > place
    needs = not takes_any and len(parameters) > place and parameters[place].default is inspect.Parameter.empty
    name = getattr(method, "__name__", "the step")

    def call(*arguments: Any) -> Any:
        number = loader()
        if number is not None and not takes and is_lightning_module(task):
            raise UserError(f"there are several loaders: give {name} of {type(task).__name__} a dataloader_idx")
        if number is not None and takes:
            return called(*arguments, number)
        return called(*arguments, 0) if needs else called(*arguments)

    return call


class AroundBatch:
    """A step method between the hooks of a batch. The end of a training batch comes after the update, elsewhere."""

    def __init__(
        self, method: Callable[..., Any], transfer: Any, start: Any, end: Any, stage: str,
        loader: Callable[[], int | None] = lambda: None,
    ) -> None:  # fmt: skip
        """Hooks that are None are not called."""
        self._loader = loader
        self.method = method
        self._transfer = transfer
        self._start = start
        self._end = end
        self._training = stage == "train"
        self._is_replayed = False
        self.has_start = start is not None
        self.has_ends = start is not None or end is not None
        """Whether there is something to call before or after a step; what follows a transfer is part of it."""
        self.forget()

    def forget(self) -> None:
        """Let go of the last batch."""
        self.output: Any = None
        self.batch: Any = None
        self.batch_idx = 0

    def __call__(self, batch: Any, batch_idx: int) -> Any:
        """Call the step method and what the task wants around it."""
        if self._is_replayed:
            batch = self._transfer(batch, self._loader() or 0) if self._transfer is not None else batch
        else:
            batch = self.begin(batch, batch_idx)
        output = self.method(batch, batch_idx)
        if self._training and self._end is not None:
            self.batch, self.batch_idx, self.output = batch, batch_idx, _told(output)
        elif self._end is not None:
            self._end(output, batch, batch_idx)
        return output

    def begin(self, batch: Any, batch_idx: int) -> Any:
        """The batch after its transfer, of which the hook at the start has heard."""
        if self._transfer is not None:
            batch = self._transfer(batch, self._loader() or 0)
        if self._start is not None and self._start(batch, batch_idx) == -1 and self._training:
            raise SkipEpoch
        return batch

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Issue a step that is captured: whoever replays it calls the hook at the start of each batch."""
        self._is_replayed = True
        try:
            yield
        finally:
            self._is_replayed = False


def _told(output: Any) -> Any:
    """The output of a training step as `on_train_batch_end` gets it: a dict with the loss, without its graph.

    Of a step that was skipped (None) it is empty.
    """
    if output is None:
        return {}
    if isinstance(output, Tensor):
        return {"loss": output.detach()}
    if isinstance(output, dict):
        return {key: value.detach() if isinstance(value, Tensor) else value for key, value in output.items()}
    return output


def wrapped(
    compute: Callable[..., Any], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """A step method inside something else; the hooks around it stay as they are."""
    if isinstance(compute, AroundBatch):
        compute.method = wrap(compute.method)
        return compute
    return wrap(compute)


def compiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """A step method compiled."""
    from torch._dynamo.exc import BackendCompilerFailed

    made = torch.compile(method, dynamic=False)

    def run(*arguments: Any) -> Any:
        try:
            return made(*arguments)
        except BackendCompilerFailed as error:
            reason = (str(getattr(error, "inner_exception", error)).splitlines() or [""])[0]
            raise UserError(
                f"torch.compile cannot compile this step ({reason}); use train.program=auto, which needs no compiler"
            ) from error

    return run
