"""Activation checkpointing: what is computed again in the backward pass changes no bit, and saves memory."""

import copy
import pickle
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.nn.utils import parametrizations, spectral_norm
from torchmetrics import MeanAbsoluteError, MeanMetric

import isoscale
from isoscale.data import rng
from isoscale.engine.config import Train, parse_bytes
from isoscale.engine.step import activations
from isoscale.engine.step.recompute import differences_explained, wrap
from isoscale.errors import UserError
from isoscale.parallel import batch_norm
from isoscale.parallel.collectives import Ranks
from tests.engine.lightning import habits
from tests.engine.lightning.test_lightning import fit as fit_module
from tests.engine.lightning.test_lightning import lines
from tests.helpers import QUIET, first_of, sha, timeless
from tests.ranks import fit_on

SAMPLES = 12


class Block(nn.Module):
    """Convolutions, batch norms and a dropout."""

    def __init__(self, width_in: int, width: int, dropout: float = 0.2) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([nn.Conv2d(width_in, width, 3, padding=1), nn.Conv2d(width, width, 3)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width, momentum=None)])
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            values = self.dropout(torch.relu(norm(convolution(values))))  # one dropout, which draws twice
        return functional.pad(values, (1, 1, 1, 1))


class UNet(nn.Module):
    """Two levels with a skip connection."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.down = Block(1, 4, dropout)
        self.bottom = nn.Sequential(nn.MaxPool2d(2), Block(4, 8, dropout), nn.ConvTranspose2d(8, 4, 2, 2))
        self.up = Block(8, 4, dropout)
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, values: Tensor) -> Tensor:
        skip = self.down(values)
        return self.head(self.up(torch.cat([skip, self.bottom(skip)], 1)))


class Logging(isoscale.Supervised):
    """A task that logs from inside of a module."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, "mse", ["mae"])
        self.model.up.norms[0].register_forward_hook(self._log_mean)

    def _log_mean(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.log("mean", output.detach().mean())


def pictures() -> isoscale.Sources:
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(2, 44, 1, 8, 8, generator=generator)
    return isoscale.Sources(
        train={"input": inputs[:36], "target": targets[:36]}, val={"input": inputs[36:], "target": targets[36:]}
    )


def made() -> tuple[nn.Module, isoscale.Sources]:
    """A task that is the same every time, and data for it."""
    torch.manual_seed(0)
    return isoscale.Supervised(UNet(), "mse", ["mae"]), pictures()


def fit(path: Path, recompute: Any, task: nn.Module | None = None, **keys: Any) -> isoscale.Run:
    options = {key.replace("__", "."): value for key, value in keys.items()}
    recipe = {"data.batch_size": SAMPLES, "train.epochs": 2, "observe.every": 1, "train.recompute": recompute, **QUIET}
    return isoscale.Trainer(run=path, **{**recipe, **options}).fit(task or made()[0], pictures())


def fit_without_validation(path: Path, recompute: Any, task: nn.Module) -> isoscale.Run:
    return fit(path, recompute, task, train__epochs=1, train__evaluate="never")


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tree": {"parallel__reduce": "tree"},
    "accumulated": {"train__accumulate": 3},
    "averaged and clipped": {"train__ema": 0.9, "train__clip": 0.1, "train__precision": "64"},
    "bf16": {"train__precision": "bf16"},
}
WANTED: list[Any] = ["all", "40 kB", ["model.up", "model.bottom.*"], ["model", "model.down"]]


@pytest.mark.slow
@pytest.mark.parametrize("variant", first_of(list(VARIANTS), "plain", "tree"))
def test_a_training_has_the_bits_that_it_has_without(variant: str, tmp_path: Path) -> None:
    plain = fit(tmp_path / "plain", "none", **VARIANTS[variant])
    for number, wanted in enumerate(WANTED):
        task = made()[0]
        names = list(task.state_dict())
        run = fit(tmp_path / str(number), wanted, task, **VARIANTS[variant])
        assert sha(run) == sha(plain), wanted
        assert timeless(run) == timeless(plain), wanted
        assert list(task.state_dict()) == names
        assert not any("forward" in vars(module) for module in task.modules())


@pytest.mark.slow
@pytest.mark.parametrize("reduce", first_of(["flat", "tree", "overlap"], "tree"))
def test_two_ranks_have_the_bits_that_they_have_without(reduce: str, tmp_path: Path) -> None:
    """Batch norms see the samples of both ranks, and ask each other only once for them."""
    options = {"data__batch_size": SAMPLES, "train__epochs": 2, "observe__every": 1, "parallel__reduce": reduce}
    runs = [
        fit_on(2, tmp_path / str(number), made, train__recompute=wanted, **options)
        for number, wanted in enumerate(["none", "all", ["model.*"]])
    ]
    assert len({sha(run) for run in runs}) == 1
    assert timeless(runs[0]) == timeless(runs[1]) == timeless(runs[2])


@pytest.mark.slow
def test_a_run_may_be_stopped_and_go_on_with_other_modules_computed_again(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", "none", train__steps=6, train__epochs=None)
    fit(tmp_path / "parts", "all", train__steps=2, train__epochs=None)
    fit(tmp_path / "parts", ["model.up"], train__steps=5, train__epochs=None)
    parts = fit(tmp_path / "parts", "none", train__steps=6, train__epochs=None)
    assert sha(parts) == sha(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "habit",
    first_of(habits.HABITS, habits.Spectral, habits.WithMeter, habits.InPlace, habits.ManualAccumulation),
    ids=lambda habit: habit.__name__,
)
def test_a_lightning_module_has_the_bits_that_it_has_without(habit: Any, tmp_path: Path) -> None:
    def trained(name: str, wanted: Any) -> tuple[dict[str, Any], Any]:
        module, data = habits.made(habit)
        if wanted == "children":
            wanted = [name for name, child in module.named_children() if activations.why_not(child) is None]
        fit_module(module, data, tmp_path / name, 2, **{"train.recompute": wanted})
        return module.state_dict(), lines(tmp_path / name)

    weights, logged = trained("plain", "none")
    is_manual = not habits.made(habit)[0].automatic_optimization
    for wanted in ("children",) if is_manual else ("all", "children"):
        again, logged_again = trained(wanted, wanted)
        assert logged_again == logged
        for name, value in weights.items():
            assert torch.equal(again[name], value) if isinstance(value, Tensor) else again[name] == value, name


class Drawing(nn.Module):
    """Draws wherever a module may draw."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, values: Tensor) -> Tensor:
        noise = torch.rand_like(values) + random.random() + float(np.random.rand())
        return functional.dropout(torch.tanh(self.linear(values)) * noise, 0.3, self.training)


class OwnNorm(nn.Module):
    """A batch norm that somebody has written himself, and whose statistics also decide what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("later", None)
        self.num_calls = 0
        self.last: Tensor | None = None

    def forward(self, values: Tensor) -> Tensor:
        self.num_calls += 1
        self.replaced = self.replaced + 1
        self.later = self.replaced if self.later is None else self.later + 1
        output = functional.batch_norm(values, self.mean, self.variance, training=self.training)
        self.last = torch.tanh(output * self.mean.clone() * self.replaced * self.later) * self.num_calls
        return self.last


class Structured(nn.Module):
    """Takes and returns more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, pair: tuple[Tensor, str], *, more: dict[str, Tensor]) -> dict[str, Any]:
        values = torch.sigmoid(self.linear(pair[0]) * more["scale"]).square()
        return {"values": (values, None), "name": pair[1]}


class CallsStructured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Structured()

    def forward(self, values: Tensor) -> Tensor:
        output = self.inner((values, "a name"), more={"scale": values.exp()})
        assert output["name"] == "a name"
        return output["values"][0]


class Energy(nn.Module):
    """Differentiates inside of its forward pass, as potentials do for forces."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, values: Tensor) -> Tensor:
        with torch.enable_grad():
            values = values.detach().requires_grad_()
            energy = self.network(values)
            (forces,) = torch.autograd.grad(energy.sum(), values, create_graph=True)
        return energy + forces


def twice(module: nn.Module) -> nn.Module:
    """One module in two places."""
    return nn.Sequential(module, nn.Tanh(), module)


MODULES: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "batch norm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()), [""]),
    "cumulative batch norm": (lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=None)), ["1"]),
    "a batch norm of one's own": (lambda: nn.Sequential(nn.Linear(6, 6), OwnNorm(), nn.Tanh()), [""]),
    "spectral norm": (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh()), [""]),
    "spectral norm of a layer": (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 6))), ["0"]),
    "spectral norm by a hook": (lambda: nn.Sequential(spectral_norm(nn.Linear(6, 6)), nn.Tanh()), ["", "0"]),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 6)), nn.Tanh()), [""]),
    "dropout in two places": (lambda: twice(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))), ["0"]),
    "dropout twice inside": (lambda: nn.Sequential(twice(nn.Dropout(0.5)), nn.Linear(6, 6)), [""]),
    "nested": (lambda: twice(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), OwnNorm())), ["", "0", "0.2"]),
    "draws": (lambda: nn.Sequential(Drawing(), nn.Tanh(), Drawing()), ["0", "2"]),
    "structures": (CallsStructured, ["inner"]),
    "forces": (Energy, [""]),
    "a part of forces": (Energy, ["network.0", "network"]),
    "attention": (lambda: nn.TransformerEncoderLayer(6, 2, 16, dropout=0.1, batch_first=True), ["", "self_attn"]),
    "recurrent": (lambda: nn.Sequential(nn.LayerNorm(6), _First(nn.GRU(6, 6, 2, dropout=0.3))), ["1", "1.module"]),
}


class _First(nn.Module):
    """What a recurrent network gives first."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, values: Tensor) -> Tensor:
        return self.module(values)[0]


def computed(
    make: Callable[[], nn.Module], names: Sequence[str], between: Callable[[nn.Module], Any] = lambda module: None,
    dtype: torch.dtype = torch.float64, compute: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> tuple[nn.Module, list[Tensor]]:  # fmt: skip
    """Two steps: losses, gradients, and all that is left of them."""
    torch.manual_seed(2)
    module = make().to(dtype)
    rng.key_dropout(module)
    inputs = torch.randn(2, 5, 6, dtype=dtype)
    before = {each: vars(each).get("forward") for each in module.modules()}
    _, undo = wrap({name or "whole": module.get_submodule(name) for name in names})
    keyed = rng.StepRandom(0)
    found: list[Tensor] = []
    random.seed(3)
    np.random.seed(3)
    with rng.use(keyed), differences_explained():
        for step, values in enumerate(inputs):
            keyed.step, keyed.samples = step, torch.arange(5)
            given = values.clone().requires_grad_()
            loss = (compute(module, given) if compute else module(given).square()).sum()
            between(module)
            parameters = [each for each in module.parameters() if each.requires_grad]
            gradients = torch.autograd.grad(loss, [given, *parameters], materialize_grads=True, allow_unused=True)
            found += [loss.detach(), *gradients, *(buffer.clone() for buffer in module.buffers())]
            numbers = [torch.rand(()), torch.tensor(random.random()), torch.tensor(np.random.rand())]
            found += [*numbers, torch.tensor(list(keyed.position()[2].values()))]
            found += [torch.tensor(float(getattr(each, "num_calls", 0))) for each in module.modules()]
            found += [each.last.detach() for each in module.modules() if isinstance(each, OwnNorm)]
    undo()
    assert {each: vars(each).get("forward") for each in module.modules()} == before
    return module, found


def assert_same(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    assert len(one) == len(other)
    for number, (first, second) in enumerate(zip(one, other, strict=True)):
        assert torch.equal(first, second), number


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_module_computed_again_has_the_same_gradients_and_leaves_no_trace(name: str, dtype: torch.dtype) -> None:
    make, names = MODULES[name]
    assert_same(computed(make, names, dtype=dtype)[1], computed(make, [], dtype=dtype)[1])


BETWEEN: dict[str, Callable[[nn.Module], Any]] = {
    "the mode": lambda module: module.train(not module.training),
    "what is frozen": lambda module: module[0].weight.requires_grad_(False),
    "an attribute": lambda module: setattr(module[1], "eps", 0.5),
    "the generators": lambda module: (torch.rand(3), random.random(), np.random.rand()),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_what_changes_between_the_passes_is_put_back_for_the_second(what: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Tanh(), nn.Linear(6, 6))

    if what == "what is frozen":  # asked for before it is frozen, so that there is something to compare
        with_flag = [computed(make, names, lambda module: None)[1] for names in ([""], [])]
        assert_same(*with_flag)
    assert_same(computed(make, [""], BETWEEN[what])[1], computed(make, [], BETWEEN[what])[1])


def _second_derivatives(module: nn.Module, values: Tensor) -> Tensor:
    output = module(values)
    (first,) = torch.autograd.grad(output.sum(), values, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), values, create_graph=True)
    return output.square() + first.square() + second.square()


def _by_functional_call(module: nn.Module, values: Tensor) -> Tensor:
    weights = {name: each * 2 for name, each in module.named_parameters()}
    return torch.func.functional_call(module, weights, (values,)).square()


def _half_without_gradients(module: nn.Module, values: Tensor) -> Tensor:
    with torch.no_grad():
        target = module(values)
    return (module(values * 2) - target).square()


def _in_bfloat16(module: nn.Module, values: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return module(values.float()).float().square()


@pytest.mark.parametrize(
    "compute", [_second_derivatives, _by_functional_call, _half_without_gradients, _in_bfloat16],
    ids=lambda compute: compute.__name__.lstrip("_"),
)  # fmt: skip
@pytest.mark.parametrize("names", [["0", "2"], [""]], ids=["parts", "whole"])
def test_a_step_may_do_more_than_call_the_module(compute: Any, names: list[str]) -> None:
    def make() -> nn.Module:
        inner = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(2)]
        return nn.Sequential(inner[0], nn.Dropout(0.3), inner[1])

    dtype = torch.float32 if compute is _in_bfloat16 else torch.float64
    again, plain = (computed(make, each, dtype=dtype, compute=compute)[1] for each in (names, []))
    assert_same(again, plain)


@dataclass(frozen=True)
class Counting(Ranks):
    """Two ranks, of which the other one is silent: notes what is asked of it."""

    asked: list[str] = field(default_factory=list)

    def all_reduce(self, tensor: Tensor, what: str = "") -> None:
        self.asked.append(what)


@pytest.mark.parametrize("names", [[""], ["1"], ["", "0", "2"]], ids=["whole", "norm", "nested"])
def test_batch_norms_ask_other_ranks_no_more_often_than_without(names: list[str]) -> None:
    asked, found = [], []
    for wanted in (names, []):
        ranks = Counting(world_size=2)

        def make(ranks: Ranks = ranks) -> nn.Module:
            parts = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(2)]
            module = nn.Sequential(parts[0], nn.BatchNorm1d(6), parts[1])
            batch_norm.synchronise(module, ranks)
            return module

        found.append(computed(make, wanted)[1])
        asked.append(ranks.asked)
    assert asked[0] == asked[1] and len(asked[1]) == 2 * 3 * 2
    assert_same(*found)


def test_frozen_modules_and_those_that_get_no_gradient_are_simply_called() -> None:
    module = nn.Sequential(nn.Linear(6, 6).requires_grad_(False), nn.Tanh(), nn.Linear(6, 6))
    wrapped, undo = wrap({"0": module[0], "2": module[2]})
    module(torch.randn(3, 6)).sum().backward()
    with torch.no_grad():
        module(torch.randn(3, 6))
    assert [each.num_calls for each in wrapped] == [0, 1]
    undo()
    assert "forward" not in vars(module[0])


def test_hooks_are_called_once() -> None:
    called: list[str] = []
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    module.register_forward_pre_hook(lambda *_: called.append("before"))
    module.register_forward_hook(lambda *_: called.append("after"))
    module[0].register_full_backward_hook(lambda *_: called.append("backward inside"))
    module.register_full_backward_hook(lambda *_: called.append("backward"))
    wrap({"whole": module})
    module(torch.randn(3, 6).requires_grad_()).sum().backward()
    assert sorted(called) == ["after", "backward", "backward inside", "before"]


def test_what_is_logged_inside_counts_once(tmp_path: Path) -> None:
    """The hook that logs is on a module inside: patterns take the modules around it, this one by its own name."""
    runs = []
    for name, wanted in (("plain", "none"), ("again", ["model.up.norms.0", "model.down"])):
        torch.manual_seed(0)
        runs.append(fit(tmp_path / name, wanted, Logging(UNet()), train__epochs=1))
    assert timeless(runs[0]) == timeless(runs[1])
    assert any(line["name"] == "train/mean" for line in timeless(runs[1]))


def test_the_forward_pass_that_measures_is_not_counted(tmp_path: Path) -> None:
    runs = []
    for wanted in ("none", "all"):
        torch.manual_seed(0)
        task = isoscale.Supervised(UNet(), "mse", [MeanAbsoluteError()])
        runs.append(fit(tmp_path / wanted, wanted, task, train__epochs=1))
    assert timeless(runs[0]) == timeless(runs[1])


class LogsInside(nn.Module):
    """Holds the function that logs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.tell: Callable[..., None] = lambda *_: None

    def forward(self, values: Tensor) -> Tensor:
        output = torch.tanh(self.linear(values.flatten(1)))
        self.tell("inside", output.detach().mean())
        return output.square().view_as(values)


class Telling(isoscale.Supervised):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.model[0].tell = self.log
        return super().training_step(batch, batch_idx)


def test_a_module_that_logs_itself_does_so_once(tmp_path: Path) -> None:
    runs = []
    for wanted in ("none", ["model.0"]):
        torch.manual_seed(0)
        task = Telling(nn.Sequential(LogsInside()), "mse")
        runs.append(fit(tmp_path / str(wanted), wanted, task, train__epochs=1))
    assert timeless(runs[0]) == timeless(runs[1])
    assert any(line["name"] == "train/inside" for line in timeless(runs[1]))


def test_copies_of_a_module_in_training_and_files_with_it_are_plain() -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 6))
    names = [name for name, _ in module.named_modules()]
    _, undo = wrap({"0": module[0]})
    values = torch.randn(3, 6)
    assert [name for name, _ in module.named_modules()] == names
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert other[0].forward.__self__ is other[0]
        assert torch.equal(other(values), module(values))
    undo()
    assert "forward" not in vars(module[0])


def kept_bytes(module: nn.Module, values: Tensor) -> int:
    """What the backward pass of a module needs besides its weights, counted from outside."""
    weights = {each.untyped_storage().data_ptr() for each in (*module.parameters(), *module.buffers(), values)}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        module(values)
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in weights)


def found_in(task: nn.Module, values: Tensor) -> activations.Activations:
    return activations.measure(task, lambda batch, _: task(batch), values, 0, {})


def test_what_is_measured_is_what_is_kept() -> None:
    torch.manual_seed(0)
    task, values = UNet(dropout=0.0), torch.randn(4, 1, 16, 16)
    before = {name: each.clone() for name, each in task.state_dict().items()}
    found = found_in(task, values)
    assert all(torch.equal(each, before[name]) for name, each in task.state_dict().items())
    assert not any("forward" in vars(module) for module in task.modules())
    assert found.peak(()) == kept_bytes(task, values)


class Tap(nn.Module):
    """Notes memory that passes through it, where it is not put back with the module."""

    def forward(self, values: Tensor) -> Tensor:
        PASSED.append(StorageWeakRef(values.untyped_storage()))
        return values


PASSED: list[StorageWeakRef] = []


def test_the_pass_that_measures_keeps_nothing() -> None:
    """It has to fit where a plain pass does not."""
    alive: list[int] = []
    task = nn.Sequential(*[nn.Linear(8, 8), nn.Tanh(), Tap()] * 10)

    def compute(batch: Tensor, batch_idx: int) -> Tensor:
        output = task(batch)
        alive.append(sum(not each.expired() for each in PASSED))
        return output

    PASSED.clear()
    activations.measure(task, compute, torch.randn(3, 8), 0, {})
    assert len(PASSED) == 10 and alive == [1]


def test_all_keeps_far_less_and_a_budget_is_kept() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(*[nn.Linear(32, 32), nn.Tanh()] * 6) for _ in range(16)]
    task, values = nn.Sequential(nn.Linear(32, 32), *blocks), torch.randn(64, 32)
    found = found_in(task, values)
    chosen, one = activations.best(found, task, {}), 64 * 32 * 4
    assert set(chosen) <= set(blocks) and len(chosen) >= 12
    assert found.peak(chosen) <= 24 * one < 0.3 * found.peak(())
    few = activations.within(found, chosen, budget := 40 * one)
    assert 0 < len(few) < len(chosen) and found.peak(few) <= budget
    assert activations.within(found, chosen, found.peak(())) == []
    _, undo = wrap({str(number): block for number, block in enumerate(chosen)})
    assert kept_bytes(task, values) <= found.peak(chosen)
    undo()


def test_a_long_sequence_of_layers_is_computed_again_in_pieces(tmp_path: Path, capsys: Any) -> None:
    runs = []
    for wanted in ("none", "all"):
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.1)]
        for _ in range(5):
            layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.1)]
        task = isoscale.Supervised(nn.Sequential(*layers, nn.Conv2d(8, 1, 1)), "mse")
        names = [name for name, _ in task.named_modules()]
        runs.append(fit(tmp_path / wanted, wanted, task, train__epochs=1, observe__level="info"))
        assert [name for name, _ in task.named_modules()] == names
        assert not any("forward" in vars(module) for module in task.modules())
    assert sha(runs[0]) == sha(runs[1]) and timeless(runs[0]) == timeless(runs[1])
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("recompute:"))
    least, whole = (float(text) for text in re.findall(r"([\d.]+) [KM]iB", said))
    assert "model[0:" in said and least < 0.6 * whole, said


def test_a_unet_is_computed_again_in_blocks_and_not_as_a_whole() -> None:
    torch.manual_seed(0)
    task, values = nn.Sequential(UNet()), torch.randn(4, 1, 32, 32)
    names = {module: name for name, module in task.named_modules()}
    found = found_in(task, values)
    chosen = [names[module] for module in activations.best(found, task, {})]
    assert {"0.down", "0.up"} <= set(chosen) and "0" not in chosen
    assert found.peak(activations.best(found, task, {})) < 0.75 * found.peak(())


def test_what_is_computed_again_and_how_much_it_takes_is_said(tmp_path: Path, capsys: Any) -> None:
    lines = {}
    for number, wanted in enumerate(("all", "model.up", "1 GB", "1 kB")):
        named = [wanted] if "." in wanted else wanted
        fit(tmp_path / str(number), named, train__steps=1, observe__level="info")
        said = capsys.readouterr().out.splitlines()
        lines[wanted] = next(line for line in said if line.startswith("recompute:"))
    assert "model.down" in lines["all"] and "instead of" in lines["all"]
    assert lines["model.up"] == "recompute: model.up (1 module) in the backward pass"
    assert lines["1 GB"].startswith("recompute: nothing, activations take") and "within the 1 GB" in lines["1 GB"]
    assert "more than the 1 kB of train.recompute" in lines["1 kB"] and "model.down" in lines["1 kB"]


class Flat(isoscale.Supervised):
    """A task with all that can be named, and cannot be taken."""

    def __init__(self) -> None:
        model = nn.ModuleDict(
            {
                "blocks": nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)]),
                "metric": nn.Sequential(nn.Linear(64, 64), MeanMetric()),
                "hooked": nn.Sequential(nn.Linear(64, 64)),
                "compiled": torch.compile(nn.Linear(64, 64), backend="eager"),
                "in_place": nn.Sequential(nn.ReLU(inplace=True), nn.Linear(64, 64)),
            }
        )
        super().__init__(model, "mse")
        self.model.hooked[0].register_forward_hook(lambda *_: None)
        self.model.hooked.register_forward_hook(lambda *_: None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        values = batch["input"].flatten(1)
        for block in (*self.model.blocks, self.model.hooked, self.model.in_place):
            values = block(values * 1)
        return functional.mse_loss(values, batch["target"].flatten(1))


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (["model.block"], r"has no module of that name; did you mean model.blocks.*Try train.recompute=\[model.blocks"),
        (["blocks.*"], r"did you mean model.blocks"),
        (["xyz"], r"did you mean .*Try train.recompute=\["),
        (
            ["model.blocks"],
            "is a ModuleList, which is never called itself; name modules inside it: model.blocks.0, mod",
        ),
        (["model.metric"], "holds 1, which is a torchmetrics object, which would count twice"),
        (["model.hooked"], "holds 0, which has forward hooks, which would be called twice; .*model.hooked.0"),
        (["model.compiled"], r"is compiled \(torch.compile\)"),
        (["model.in_place"], r"writes to its input \(in place\).*leave model.in_place out of train.recompute"),
    ],
)
def test_a_module_that_cannot_be_taken_is_refused_with_what_to_type(wanted: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        fit_without_validation(tmp_path / "run", wanted, Flat())


def test_all_and_patterns_leave_out_what_cannot_be_taken(tmp_path: Path) -> None:
    for number, wanted in enumerate(("none", "all", ["*"], ["model.*"], ["model.in_place.*"])):
        torch.manual_seed(0)
        run = fit_without_validation(tmp_path / str(number), wanted, Flat())
        assert number == 0 or sha(run) == sha(tmp_path / "0"), wanted


class Odd(nn.Module):
    """Does something that cannot be done again."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.history: list[float] = []
        self.register_buffer("table", torch.zeros(1))
        self.generator = torch.Generator()
        self._what = what

    def forward(self, values: Tensor) -> Tensor:
        if self._what == "list":
            self.history.append(1.0)
        elif self._what == "parameter":
            with torch.no_grad():
                self.linear.weight.mul_(0.9)
        elif self._what == "generator":
            values = values * torch.rand((), generator=self.generator, dtype=values.dtype)
        elif self._what == "outside":
            OUTSIDE.append(None)
            values = torch.tanh(values) if len(OUTSIDE) % 2 else values
        return torch.tanh(self.linear(values))


OUTSIDE: list[None] = []


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("list", "whole changes whole.history in its forward pass, which would happen twice"),
        ("generator", "whole changes whole.generator in its forward pass"),
        ("parameter", "changes its own parameters in its forward pass"),
        (
            "outside",
            r"did something else when it was computed again in the backward pass \(.*leave it out of train.rec",
        ),
    ],
)
def test_what_cannot_be_done_twice_is_refused(what: str, words: str) -> None:
    OUTSIDE.clear()
    with pytest.raises(UserError, match=words):
        computed(lambda: Odd(what), [""])


class _Greedy(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        context.save_for_backward(values)
        return values.square()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * context.saved_tensors[0] + gradient * context.saved_tensors[0]


class Greedy(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return _Greedy.apply(values)


def test_a_function_that_reads_what_it_has_saved_twice_is_told_to_read_it_once() -> None:
    with pytest.raises(UserError, match=r"reads ctx.saved_tensors more than once.*into a variable"):
        computed(lambda: nn.Sequential(nn.Linear(6, 6), Greedy()), [""])


def test_weights_that_change_before_the_backward_pass_are_refused() -> None:
    def update(module: nn.Module) -> None:
        with torch.no_grad():
            module[0].weight.mul_(0.5)

    with pytest.raises(UserError, match="call backward before the optimizer's step"):
        computed(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh()), [""], update)


def test_a_module_inside_of_torch_func_is_refused() -> None:
    module = nn.Sequential(nn.Linear(6, 1))
    wrap({"model": module})
    with pytest.raises(UserError, match=r"model is called inside torch.func"):
        torch.func.grad(lambda values: module(values).sum())(torch.randn(6))


class Jacobian(isoscale.Supervised):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.func.jacrev(self.model)(batch["input"].flatten(1)[0]).square().mean()


def test_a_task_of_torch_func_cannot_be_measured_and_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"uses torch.func .*train.recompute=\[model\]"):
        fit_without_validation(tmp_path / "run", "all", Jacobian(nn.Sequential(nn.Linear(64, 3), nn.Tanh()), "mse"))


class Physics(isoscale.Supervised):
    """Derivatives of the network in the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs = batch["input"].flatten(1).requires_grad_()
        output = self.model(inputs)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        return (slope.sum(1) - output[:, 0]).square().mean()


def test_a_task_that_differentiates_in_its_step_is_measured_too(tmp_path: Path) -> None:
    shas = set()
    for number, wanted in enumerate(("none", "all", "10 kB")):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
        shas.add(sha(fit_without_validation(tmp_path / str(number), wanted, Physics(nn.Sequential(*layers), "mse"))))
    assert len(shas) == 1


def test_a_compiled_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train.program=compiled compiles them away; use train.program=auto"):
        fit(tmp_path / "run", "all", train__program="compiled")


def test_the_key_is_read_as_it_is_written() -> None:
    assert Train().recompute == Train(recompute=None).recompute == Train(recompute=[]).recompute == "none"
    assert Train(recompute=["a.*", "b"]).recompute == ["a.*", "b"]
    assert [parse_bytes(text) for text in ("20 GB", "4GiB", "1.5 mb", "7 B")] == [20 * 10**9, 4 << 30, 1_500_000, 7]
    for text in ("encoder", "20", "GB", "0 GB", "-1 GB"):
        with pytest.raises(ValueError, match=r"names of modules are a list: \["):
            Train(recompute=text)


def test_a_module_that_is_never_called_is_said(tmp_path: Path, capsys: Any) -> None:
    task = made()[0]
    task.unused = nn.Linear(2, 2).requires_grad_(False)
    fit(tmp_path / "run", ["model.up", "unused"], task, train__epochs=1, observe__level="info")
    assert "train.recompute names unused, never called" in capsys.readouterr().out


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("variant", ["plain", "tree", "accumulated", "averaged and clipped", "bf16"])
def test_a_captured_step_has_the_bits_of_an_eager_one_and_of_none_computed_again(variant: str, tmp_path: Path) -> None:
    found = {}
    options = {"train__precision": "32", **VARIANTS[variant], "train__epochs": None, "train__steps": 60}
    for program in ("eager", "graphed"):
        for number, wanted in enumerate(WANTED if program == "graphed" else ["none", "all"]):
            path = tmp_path / f"{program}{number}"
            task = made()[0]
            for module in task.modules():
                if isinstance(module, nn.BatchNorm2d):  # a mean over all steps asks on the host how many there were
                    module.momentum = 0.1
            run = fit(
                path, wanted, task, train__program=program, train__steps_per_launch=3, observe__every=3, **options
            )
            found[program, str(wanted)] = sha(run), timeless(run)
            assert run.record["decided"]["program"] == program
    assert all(each == found["eager", "none"] for each in found.values())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_falls_on_the_device() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh()) for _ in range(16)]
    task, values = nn.Sequential(*blocks).cuda(), torch.randn(8192, 512, device="cuda")

    def peak() -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        task(values).sum().backward()
        task.zero_grad()
        return torch.cuda.max_memory_allocated() - before

    plain = peak()
    _, undo = wrap({str(number): block for number, block in enumerate(blocks)})
    assert peak() < 0.6 * plain
    undo()
