"""Optimizers by name: the same weights as torch's own classes used by hand, and a stop that leaves no trace."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isoscale
from isoscale.engine.config import Optimizer as Section
from isoscale.engine.optim.optimizers import (
    FUSED,
    OptimizerState,
    choose_path,
    make_optimizers,
    optimizer_class,
    set_lr,
)
from isoscale.engine.state.checkpoint import Checkpoints, read
from isoscale.engine.state.registry import in_format_of
from isoscale.errors import UserError
from isoscale.system import devices as accelerator
from tests.helpers import QUIET

NAMES = sorted(
    name.lower()
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value)
    and issubclass(value, torch.optim.Optimizer)
    and name not in ("Optimizer", "LBFGS", "SparseAdam")
)
LR = 0.0078125
"""Has an exact form in float32, so that a tensor and a number are the same learning rate."""
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in NAMES),
    ("sgd", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("adam", {"amsgrad": True, "weight_decay": 0.01}),
    ("adamw", {"betas": [0.8, 0.95], "weight_decay": 0.1}),
    ("rmsprop", {"momentum": 0.9, "centered": True}),
    ("muon", {"momentum": 0.8, "weight_decay": 0.05}),
]
IDS = [f"{name}-{'-'.join(arguments) or 'plain'}" for name, arguments in VARIANTS]


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(10, 6, generator=generator), torch.randn(10, 3, generator=generator)


def train(model: nn.Module, optimizers: list[Any], start: int, stop: int) -> None:
    for step in range(start, stop):
        for optimizer in optimizers:
            optimizer.zero_grad()
        rows, targets = batch(step)
        (model(rows) - targets).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def ours(model: nn.Module, name: str, arguments: dict[str, Any]) -> list[Any]:
    path = choose_path(optimizer_class(name), accelerator.find("cpu"))
    optimizers = make_optimizers(Section(name=name, lr=LR, **arguments), model.named_parameters(), path)
    if path.tensor_lr:
        for optimizer in optimizers:
            set_lr(optimizer, torch.tensor(LR))
    return optimizers


def theirs(model: nn.Module, name: str, arguments: dict[str, Any]) -> list[Any]:
    """Made by hand, as torch documents it."""
    cls = optimizer_class(name)
    fused = {"fused": True} if cls.__name__ in FUSED else {}
    if name != "muon":
        return [cls(list(model.parameters()), lr=LR, **fused, **arguments)]  # type: ignore[call-arg]
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    decay = {key: value for key, value in arguments.items() if key == "weight_decay"}
    return [
        torch.optim.Muon(matrices, lr=LR, adjust_lr_fn="match_rms_adamw", **arguments),
        torch.optim.AdamW(rest, lr=LR, **decay),
    ]


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize(("name", "arguments"), VARIANTS, ids=IDS)
def test_an_optimizer_by_name_gives_the_weights_of_torchs_own(name: str, arguments: dict[str, Any]) -> None:
    mine, reference = network(), network()
    train(mine, ours(mine, name, arguments), 0, 6)
    train(reference, theirs(reference, name, arguments), 0, 6)
    torch.testing.assert_close(weights(mine), weights(reference), rtol=1e-6, atol=1e-7)
    assert not torch.equal(weights(mine), weights(network()))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), VARIANTS, ids=IDS)
def test_saving_and_loading_an_optimizer_in_the_middle_changes_no_bit(
    name: str, arguments: dict[str, Any], tmp_path: Path
) -> None:
    straight = network()
    train(straight, ours(straight, name, arguments), 0, 10)
    first = network()
    optimizers = ours(first, name, arguments)
    train(first, optimizers, 0, 5)
    tensors, values = OptimizerState(optimizers, first).state()
    saved = Checkpoints(tmp_path).save(5, ({"optimizer": tensors}, {"optimizer": values}))
    second = network()
    second.load_state_dict(first.state_dict())
    again = ours(second, name, arguments)
    stored = read(saved)
    OptimizerState(again, second).load(stored[0].get("optimizer", {}), stored[1]["optimizer"])
    train(second, again, 5, 10)
    assert torch.equal(weights(second), weights(straight))


def sources() -> isoscale.Sources:
    rows = [batch(step) for step in range(6)]
    return isoscale.Sources(train={"input": torch.cat([r for r, _ in rows]), "target": torch.cat([t for _, t in rows])})


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_of_torch_trains_through_the_trainer(name: str, tmp_path: Path) -> None:
    recipe = {
        "optimizer": {"name": name, "lr": LR},
        "data": {"batch_size": 10, "shuffle": False},
        "train": {"epochs": 1, "threads": 1, "device": "cpu"},
        "observe": {"level": "error", "tensorboard": 0},
    }
    model, reference = network(), network()
    isoscale.Trainer(recipe, run=tmp_path / "run").fit(isoscale.Supervised(model, "mse"), sources())
    train(reference, theirs(reference, name, {}), 0, 6)
    torch.testing.assert_close(weights(model), weights(reference), rtol=1e-5, atol=1e-6)


def test_muon_takes_the_matrices_and_leaves_the_rest_to_adamw() -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.Linear(4, 5))
    muon, others = ours(model, "muon", {"weight_decay": 0.2, "momentum": 0.8})
    assert isinstance(muon, torch.optim.Muon) and isinstance(others, torch.optim.AdamW)
    assert [tuple(parameter.shape) for parameter in muon.param_groups[0]["params"]] == [(5, 4)]
    assert {tuple(parameter.shape) for parameter in others.param_groups[0]["params"]} == {(3, 2, 3), (3,), (5,)}
    assert muon.defaults["weight_decay"] == others.defaults["weight_decay"] == 0.2
    assert [type(each).__name__ for each in ours(nn.Linear(4, 5, bias=False), "muon", {})] == ["Muon"]
    assert [type(each).__name__ for each in ours(nn.BatchNorm1d(4), "muon", {})] == ["AdamW"]


@pytest.mark.parametrize("name", ["adma", "lbfgs", "sparseadam"])
def test_an_optimizer_that_cannot_train_in_steps_is_refused_with_those_that_can(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="adam"):
        isoscale.Trainer({"optimizer": {"name": name}}, run=tmp_path / "run", **QUIET).fit(
            isoscale.Supervised(network(), "mse"), sources()
        )
    assert not (tmp_path / "run").exists()


def test_arguments_that_an_optimizer_does_not_take_are_named() -> None:
    with pytest.raises(UserError, match=r"SGD refuses its arguments.*betas"):
        ours(network(), "sgd", {"betas": (0.9, 0.99)})
    with pytest.raises(UserError, match="Adam refuses its arguments"):
        ours(network(), "adam", {"weight_decay": -1.0})


def test_a_task_without_parameters_is_refused() -> None:
    with pytest.raises(UserError, match="no parameters"):
        ours(nn.ReLU(), "adam", {})


class Counting(torch.optim.Optimizer):
    """Keeps a plain number for each parameter, which its steps follow."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            count = self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1
            parameter.sub_(parameter.grad, alpha=0.1 / count)


def test_numbers_in_the_state_of_an_optimizer_are_kept_too() -> None:
    straight, cut = network(), network()
    train(straight, [Counting(straight.parameters())], 0, 6)
    first, second = [Counting(cut.parameters())], [Counting(cut.parameters())]
    train(cut, first, 0, 3)
    OptimizerState(second, cut).load(*OptimizerState(first, cut).state())
    train(cut, second, 3, 6)
    assert torch.equal(weights(cut), weights(straight))


def test_a_state_of_another_model_is_refused_with_the_parameter_it_knows() -> None:
    one, two = network(), nn.Linear(3, 3)
    optimizers = ours(one, "adam", {})
    train(one, optimizers, 0, 1)
    state = OptimizerState(optimizers, one).state()
    other = OptimizerState(ours(two, "adam", {}), two)
    with pytest.raises(UserError, match=r"knows '0/\w+/0\.weight', which is not a parameter of the model"):
        other.load(*state)


class TestGroups:
    def groups(self, name: str = "sgd", **section: Any) -> list[dict[str, Any]]:
        made = make_optimizers(
            Section(name=name, lr=LR, **section),
            network().named_parameters(),
            choose_path(optimizer_class(name), accelerator.find("cpu")),
        )
        for optimizer in made:
            set_lr(optimizer, LR)
        return [group for optimizer in made for group in optimizer.param_groups]

    def test_each_parameter_goes_to_the_first_group_that_matches(self) -> None:
        first, second, rest = self.groups(
            weight_decay=0.5,
            groups=[
                {"match": ["0.bias"], "weight_decay": 0.0, "lr_scale": 8.0},
                {"match": ["*.bias", "2.weight"], "weight_decay": 0.1},
            ],
        )
        assert [tuple(p.shape) for p in first["params"]] == [(8,)]
        assert [tuple(p.shape) for p in second["params"]] == [(3, 8), (3,)]
        assert [tuple(p.shape) for p in rest["params"]] == [(8, 6)]
        assert [group["weight_decay"] for group in (first, second, rest)] == [0.0, 0.1, 0.5]
        assert [group["lr"] for group in (first, second, rest)] == [8 * LR, LR, LR]

    def test_muon_keeps_groups_on_both_sides(self) -> None:
        found = self.groups("muon", groups=[{"match": ["2.*"], "lr_scale": 0.5}])
        assert [(len(group["params"]), group["lr"]) for group in found] == [
            (1, LR / 2), (1, LR), (1, LR / 2), (1, LR)
        ]  # fmt: skip

    def test_a_group_that_matches_nothing_is_refused(self) -> None:
        with pytest.raises(UserError, match=r"\['\*.norm'\] matches no parameter .* 0.weight"):
            self.groups(groups=[{"match": ["*.norm"]}])

    def test_an_argument_that_the_optimizer_does_not_have_is_refused(self) -> None:
        with pytest.raises(UserError, match="SGD has no argument betas"):
            self.groups(groups=[{"match": ["*"], "betas": [0.9, 0.99]}])

    def test_a_group_trains_at_its_own_rate(self, tmp_path: Path) -> None:
        def moved(scale: float) -> tuple[float, float]:
            model = network()
            before = {name: value.clone() for name, value in model.state_dict().items()}
            data = isoscale.Sources(train=dict(zip(("input", "target"), batch(0), strict=True)))
            recipe = {
                "optimizer": {"name": "sgd", "lr": 0.01, "groups": [{"match": ["model.0.*"], "lr_scale": scale}]},
                "data": {"batch_size": 10},
                "train": {"steps": 1},
            }
            isoscale.Trainer(recipe, run=tmp_path / str(scale), **QUIET).fit(isoscale.Supervised(model), data)
            return tuple(float((model.state_dict()[n] - before[n]).norm()) for n in ("0.weight", "2.weight"))  # type: ignore[return-value]

        (first, second), (scaled, same) = moved(1.0), moved(3.0)
        assert scaled == pytest.approx(3 * first, rel=1e-4) and same == pytest.approx(second, rel=1e-6)


def test_fused_optimizers_get_gradients_in_the_memory_format_of_the_weights() -> None:
    """Given another one, their kernels update the wrong weights, and say nothing."""
    found = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        generator = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.randn(4, 3, 2, 2, generator=generator).contiguous(memory_format=memory_format))
        optimizer = torch.optim.Adam([weight], fused=True)
        for _ in range(3):
            weight.grad = in_format_of(weight, torch.randn(4, 3, 2, 2, generator=generator))
            optimizer.step()
        found.append(weight.detach().contiguous())
    assert torch.equal(*found)
