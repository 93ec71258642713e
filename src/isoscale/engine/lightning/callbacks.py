"""Callbacks: objects with Lightning's hook names, called around the task's own hooks and saved with the run.

They need not derive from anything. For every hook that one of them defines, the task gets a hook that calls them and
then its own, so that whoever calls the hooks of a task calls those of the callbacks as well, and nobody else pays.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from isoscale.engine.lightning.ckpt import contents
from isoscale.engine.lightning.overrides import overrides
from isoscale.engine.lightning.trainer_view import TrainerView
from isoscale.engine.state.module_state import ExtraState
from isoscale.engine.state.registry import digest
from isoscale.errors import UserError
from isoscale.parallel.serialize import NotPlain, put_together, take_apart

BETWEEN_PARTS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Hooks inside of a training step."""
_HOOKS = (
    "on_fit_start", "on_fit_end", "on_sanity_check_start", "on_sanity_check_end", "on_exception", *BETWEEN_PARTS,
    *(f"on_{stage}_{moment}" for stage in ("train", "validation", "test", "predict")
      for moment in ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")),
)  # fmt: skip
_REFUSED = {
    "BatchSizeFinder": "choose data.batch_size by a few short runs (isoscale sweep)",
    "GradientAccumulationScheduler": "use train.accumulate, which is the same in every epoch",
    "LearningRateFinder": "choose optimizer.lr by a few short runs (isoscale sweep)",
    "ModelPruning": "prune in the constructor of the module (torch.nn.utils.prune): masks are saved with its weights",
    "StochasticWeightAveraging": "use train.ema, or Lightning's WeightAveraging",
}
_OF_LIGHTNING_1 = {
    "on_batch_end": "on_train_batch_end",
    "on_batch_start": "on_train_batch_start",
    "on_configure_sharded_model": "setup",
    "on_epoch_end": "on_train_epoch_end",
    "on_epoch_start": "on_train_epoch_start",
    "on_init_end": "setup",
    "on_init_start": "setup",
    "on_keyboard_interrupt": "on_exception",
    "on_pretrain_routine_end": "on_fit_start",
    "on_pretrain_routine_start": "on_fit_start",
}
"""Hooks of callbacks that Lightning 2 has removed, and what took their place."""
_MONITORS = {"Checkpoint", "EarlyStopping"}
"""Called after the task's own hook at the end of an epoch, because they look at what it logs."""
_IDLE: dict[tuple[str, str], Callable[[Any], bool]] = {
    ("ModelCheckpoint", "on_train_batch_end"):
        lambda each: each._every_n_train_steps < 1 and each._train_time_interval is None,
    ("Timer", "on_train_batch_end"): lambda each: each._interval != "step",
    ("LearningRateMonitor", "on_train_batch_start"): lambda each: each.logging_interval == "epoch",
}  # fmt: skip
"""Hooks of Lightning's own classes that do nothing the way they are set: they must not cost a launch a step."""
_BESIDES = {
    "ModelCheckpoint": (
        "current_score", "_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation"
    ),
    "WeightAveraging": ("_latest_update_epoch",),
}  # fmt: skip
"""What the `state_dict` of Lightning's own classes leaves out and the rest of a training depends on."""

_AS_IT_CAME = "_as_it_came"
"""Where a callback keeps what it was before its first training in a process: it may be trained with again."""


def chosen(given: Sequence[Any], task: Any, say: Callable[[str], None]) -> list[Any]:
    """The callbacks that were given and those of `configure_callbacks`, which replace given ones of their type.

    Those that write checkpoints come last. What cannot work is refused, and progress bars are left out with a line.
    """
    configure = getattr(task, "configure_callbacks", None)
    own = configure() if callable(configure) else None
    own = list(own) if isinstance(own, Sequence) else [] if own is None else [own]
    replaced = {type(each) for each in given if any(issubclass(type(other), type(each)) for other in own)}
    kept = []
    for callback in [*(each for each in given if type(each) not in replaced), *own]:
        names = _bases(callback)
        for name in _REFUSED:
            if name in names:
                raise UserError(f"the callback {name} cannot work here: {_REFUSED[name]}")
        removed = [f"{name} (use {instead})" for name, instead in _OF_LIGHTNING_1.items() if defines(callback, name)]
        if removed:
            raise UserError(
                f"the callback {type(callback).__name__} defines hooks of Lightning 1, which nobody calls any more: "
                f"{'; '.join(removed)}"
            )
        if "ProgressBar" in names:
            say(f"isoscale shows the progress itself: the callback {type(callback).__name__} is left out")
            continue
        if isinstance(callback, type):
            raise UserError(f"the callback {callback.__name__} is a class: give an object, {callback.__name__}(…)")
        kept.append(callback)
    return sorted(kept, key=lambda each: "Checkpoint" in _bases(each))


def _bases(callback: Any) -> set[str]:
    return {cls.__name__ for cls in type(callback).__mro__}


def defines(callback: Any, name: str) -> bool:
    """Whether a callback has a hook of its own, rather than the empty one of a base class named `Callback`."""
    if name in getattr(callback, "__dict__", {}):
        return callable(vars(callback)[name])
    found = next((cls for cls in type(callback).__mro__ if name in vars(cls)), None)
    if found is None or found.__name__ == "Callback":
        return False
    is_idle = _IDLE.get((found.__name__, name)) if _is_lightnings(found) else None
    return is_idle is None or not is_idle(callback)


def _is_lightnings(cls: type) -> bool:
    return cls.__module__.startswith(("lightning.pytorch.", "pytorch_lightning."))


def combine(task: Any, view: TrainerView) -> list[str]:
    """Give a task the hooks of callbacks beside its own; the names of them, which `overrides` knows from then on."""
    names = [name for name in _HOOKS if any(defines(callback, name) for callback in view.callbacks)]
    for name in names:
        object.__setattr__(task, name, _combined(task, view, name))
    return names


def _combined(task: Any, view: TrainerView, name: str) -> Callable[..., Any]:
    having = [callback for callback in view.callbacks if defines(callback, name)]
    late = [each for each in having if name == "on_train_epoch_end" and _MONITORS & _bases(each)]
    first = [getattr(callback, name) for callback in having if callback not in late]
    own, last = getattr(task, name, None), [getattr(callback, name) for callback in late]

    def hook(*arguments: Any) -> Any:
        for call in first:
            call(view, task, *arguments)
        found = own(*arguments) if own is not None else None
        if last:
            view.before_monitors()
        for call in last:
            call(view, task, *arguments)
        return found

    return hook


def set_up(task: Any, view: TrainerView) -> None:
    """Let callbacks log as the task does, and call their `setup`."""
    for callback in view.callbacks:
        for name in ("log", "log_dict"):
            if hasattr(callback, "__dict__") and not hasattr(type(callback), name):
                vars(callback)[name] = _as_task(task, name)
        if "ModelCheckpoint" in _bases(callback) and callback.dirpath is None:
            callback.dirpath = os.path.join(view.default_root_dir, "checkpoints")
            view.homeless.append(callback)
    for callback in view.callbacks:
        if defines(callback, "setup"):
            callback.setup(view, task, "fit")


def _as_task(task: Any, name: str) -> Callable[..., None]:
    return lambda *arguments, **options: getattr(task, name)(*arguments, **options)


def tear_down(task: Any, view: TrainerView) -> None:
    """Call the `teardown` of callbacks, and take back what was set on them."""
    for callback in view.callbacks:
        if defines(callback, "teardown"):
            callback.teardown(view, task, "fit")
        for name in ("log", "log_dict"):
            getattr(callback, "__dict__", {}).pop(name, None)
    for callback in view.homeless:
        callback.dirpath = None
    view.homeless.clear()


class CallbackState:
    """What callbacks keep, and what save hooks of the task, its data module and callbacks put into a checkpoint."""

    def __init__(self, task: Any, view: TrainerView) -> None:
        """The callbacks as they are now, after their `setup`, are what is not saved."""
        self._task, self._view = task, view
        self._attributes = [
            None if defines(callback, "state_dict") else _Attributes(callback, (task, view))
            for callback in view.callbacks
        ]
        data = view.datamodule
        has_state = data is not None and data is not task and overrides(data, "state_dict")
        self._data = data if has_state else None
        self._savers = [each for each in view.callbacks if defines(each, "on_save_checkpoint")]
        self._loaders = [each for each in view.callbacks if defines(each, "on_load_checkpoint")]

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to save."""
        hooks = ("on_save_checkpoint", "on_load_checkpoint")
        return bool(self._view.callbacks or self._data is not None or any(overrides(self._task, n) for n in hooks))

    @property
    def _keys(self) -> list[str]:
        return [_key(callback) for callback in self._view.callbacks]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Nothing: it is gathered for a checkpoint only, because hooks are called for it."""
        return {}, {}

    def together(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state of all ranks: once where it is the same on all, else that of each."""
        tensors: dict[str, Tensor] = {}
        values: dict[str, Any] = {"keys": self._keys, "written": self._view.written, "callbacks": []}
        for number, (callback, attributes) in enumerate(zip(self._view.callbacks, self._attributes, strict=True)):
            owner = f"the callback {type(callback).__name__}"
            if attributes is not None:
                found, kept = attributes.state()
                tensors.update({f"{number}/{name}": tensor for name, tensor in found.items()})
                values["callbacks"].append(kept)
            else:
                saved = {"state": callback.state_dict(), "besides": _besides(callback)}
                values["callbacks"].append(_plain(saved, f"{number}/state", tensors, f"state_dict of {owner}"))
        if self._data is not None:
            who = f"state_dict of {type(self._data).__name__}"
            values["data"] = _plain(self._data.state_dict(), "data", tensors, who)
        values["checkpoint"] = _plain(self._of_hooks(), "checkpoint", tensors, "on_save_checkpoint")
        ranks = self._view.ranks
        if ranks.alone:
            return tensors, values
        mine = repr((values, [(name, int(digest(tensor))) for name, tensor in tensors.items()]))
        if len(set(ranks.all_gather(mine, "whether callbacks keep the same on all ranks"))) == 1:
            return tensors, values
        on_host = {name: tensor.cpu() for name, tensor in tensors.items()}
        every = ranks.all_gather((on_host, values), "what callbacks keep on each rank")
        joined = {f"{rank}/{name}": each for rank, (found, _) in enumerate(every) for name, each in found.items()}
        return joined, {"ranks": [values for _, values in every]}

    def _of_hooks(self) -> dict[str, Any]:
        """What save hooks add to Lightning's checkpoint, or replace there."""
        if not self._savers and not overrides(self._task, "on_save_checkpoint"):
            return {}
        checkpoint = contents(self._view, self._task)
        before = {**checkpoint, "state_dict": dict(checkpoint["state_dict"])}
        for callback in self._savers:
            callback.on_save_checkpoint(self._view, self._task, checkpoint)
        if overrides(self._task, "on_save_checkpoint"):
            self._task.on_save_checkpoint(checkpoint)
        own, weights = before["state_dict"], checkpoint.pop("state_dict", {})
        if own.keys() != weights.keys() or any(own[name] is not weights[name] for name in own):
            checkpoint["state_dict"] = dict(weights)
        return {key: value for key, value in checkpoint.items() if value is not before.get(key)}

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Give callbacks, and the load hooks of the task, back what was saved."""
        if "ranks" in values:
            of_ranks, own = values["ranks"], self._view.ranks.rank
            rank = own if own < len(of_ranks) else 0
            start = f"{rank}/"
            tensors = {name.removeprefix(start): each for name, each in tensors.items() if name.startswith(start)}
            values = of_ranks[rank]
        if values["keys"] != self._keys:
            raise UserError(
                f"the run was saved with the callbacks {', '.join(values['keys']) or '(none)'}, and now there are "
                f"{', '.join(self._keys) or '(none)'}: give the same ones, in the same order"
            )
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        self._view.written[:] = values["written"]
        _remove_later_files(self._view)
        if self._data is not None and "data" in values:
            self._data.load_state_dict(put_together(values["data"], copies, device=self._device))
        self._call_loaders(put_together(values["checkpoint"], copies, device=self._device))
        for number, callback in enumerate(self._view.callbacks):
            saved, attributes = values["callbacks"][number], self._attributes[number]
            if attributes is not None:
                start = f"{number}/"
                found = {name.removeprefix(start): each for name, each in copies.items() if name.startswith(start)}
                attributes.load(found, saved)
                continue
            state = put_together(saved, copies, device=self._device)
            if state["state"]:
                callback.load_state_dict(state["state"])
            for name, value in state["besides"].items():
                setattr(callback, name, value)

    def _call_loaders(self, added: dict[str, Any]) -> None:
        if not self._loaders and not overrides(self._task, "on_load_checkpoint"):
            return
        checkpoint = {**contents(self._view, self._task), **added}
        if overrides(self._task, "on_load_checkpoint"):
            self._task.on_load_checkpoint(checkpoint)
        for callback in self._loaders:
            callback.on_load_checkpoint(self._view, self._task, checkpoint)

    @property
    def _device(self) -> Any:
        return next((each.device for each in self._task.parameters()), None)


def _plain(value: Any, name: str, tensors: dict[str, Tensor], owner: str) -> Any:
    """The structure of what somebody wants to save; tensors go aside, and anything that is not plain is refused."""
    for path, entry in _leaves(value, ""):
        try:
            take_apart(entry, name, {})
        except NotPlain as error:
            raise UserError(
                f"{owner} wants to save {path or 'something'}, which a checkpoint cannot hold: {error}; save tensors, "
                "numbers, strings, lists and dicts"
            ) from error
    found: dict[str, Tensor] = {}
    structure = take_apart(value, name, found)
    tensors.update({key: tensor.detach() for key, tensor in found.items()})
    return structure


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from _leaves(entry, f"{path}[{key!r}]")
    else:
        yield path, value


def _besides(callback: Any) -> dict[str, Any]:
    names = [name for cls in type(callback).__mro__ if _is_lightnings(cls) for name in _BESIDES.get(cls.__name__, ())]
    return {name: getattr(callback, name) for name in names}


def _key(callback: Any) -> str:
    key = getattr(callback, "state_key", None)
    return key if isinstance(key, str) else type(callback).__qualname__


def _remove_later_files(view: TrainerView) -> None:
    """Remove checkpoint files that this run wrote after the state that it goes on from: they are written again."""
    if not view.is_global_zero or not view.saves:
        return
    root, known = Path(view.default_root_dir).resolve(), {Path(path).resolve() for path in view.written}
    folders = {Path(each.dirpath).resolve() for each in view.callbacks if getattr(each, "dirpath", None)}
    for folder in folders:
        if folder.is_relative_to(root):  # elsewhere there may be files of others
            for path in folder.glob("*.ckpt"):
                if path.resolve() not in known:
                    path.unlink(missing_ok=True)


class _Attributes:
    """The plain attributes of a callback, saved as those of a module are."""

    def __init__(self, callback: Any, known: Sequence[Any]) -> None:
        """Of `callback`; objects in `known` are saved elsewhere."""
        self._callback = callback
        self._holder: nn.Module = getattr(callback, "__dict__", {}).setdefault(_AS_IT_CAME, nn.Module())
        self._names: set[str] = set()
        self._look()
        self._extra = ExtraState(self._holder, known)

    def _look(self) -> None:
        own = {f"its_{name}": value for name, value in getattr(self._callback, "__dict__", {}).items()
               if name not in ("log", "log_dict", _AS_IT_CAME)}  # fmt: skip
        for name in self._names - own.keys():
            vars(self._holder).pop(name, None)
        vars(self._holder).update(own)
        self._names = set(own)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What has changed since the start."""
        self._look()
        return self._extra.state()

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take over what was saved."""
        self._look()
        self._extra.load(tensors, values)
        own = vars(self._callback)
        after = {name.removeprefix("its_"): value for name, value in vars(self._holder).items()
                 if name.startswith("its_")}  # fmt: skip
        for name in self._names:
            if name.removeprefix("its_") not in after:
                own.pop(name.removeprefix("its_"), None)
        own.update(after)
