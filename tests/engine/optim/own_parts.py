"""An optimizer, schedules, losses and metrics as users write them, in a file of their own."""

import math

import torch
from torch import Tensor, nn


class Lion(torch.optim.Optimizer):
    """Steps by the sign of an average of gradients."""

    def __init__(self, params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
                slow, fast = group["betas"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(torch.sign(average * slow + parameter.grad * (1 - slow)), alpha=-group["lr"])
                average.mul_(fast).add_(parameter.grad, alpha=1 - fast)


class Hoarder(torch.optim.Optimizer):
    """Keeps what it knows wherever one can, and draws noise."""

    def __init__(self, params, lr: float, noise: float = 0.1):
        super().__init__(params, {"lr": lr, "noise": noise})
        self.count = 0
        self.recent: list[int] = []
        self.inner = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.parameters = [each for group in self.param_groups for each in group["params"]]

    @torch.no_grad()
    def step(self):
        self.count += 1
        self.recent = [*self.recent, self.count][-3:]
        self.state["total"] = self.state.get("total", 0) + self.count
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group["seen"] = group.get("seen", 0) + sum(self.recent)
            inner["lr"] = group["lr"] / (1 + 0.001 * (self.count + group["seen"] + self.state["total"]))
            for parameter in (each for each in group["params"] if each.grad is not None):
                parameter.add_(torch.randn_like(parameter), alpha=group["noise"] * group["lr"])
        self.inner.step()


class Slowing(torch.optim.Optimizer):
    """Counts its steps in its groups, which have nothing else but their rate at first."""

    def __init__(self, params, lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in (each for each in group["params"] if each.grad is not None):
                parameter.add_(parameter.grad, alpha=-group["lr"] / group["count"])


class Claims(Lion):
    """Keeps something that no checkpoint can hold."""

    def __init__(self, params, lr: float = 1e-3):
        super().__init__(params, lr)
        self.generator = torch.Generator()


class NoRate(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        pass


class HiddenRate(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {})

    def step(self):
        pass


class WithClosure(Lion):
    def step(self, closure):
        return closure()


def ramp(step: int, num_steps: int, low: float = 0.1) -> float:
    return low + (1 - low) * step / num_steps


class Wave:
    def __init__(self, periods: int = 3):
        self.periods = periods

    def __call__(self, step: int, num_steps: int) -> float:
        return 0.5 + 0.5 * math.cos(2 * math.pi * self.periods * step / num_steps)


def breaks(step: int, num_steps: int) -> float:
    return math.nan if step == 3 else 1.0


def falls_below(step: int, num_steps: int) -> float:
    return 1.0 - step


def words(step: int, num_steps: int) -> str:
    return "slow"


def of_step_only(step: int) -> float:
    return 1.0


class Stateful:
    def __init__(self):
        self.called = 0

    def __call__(self, step: int, num_steps: int) -> float:
        self.called += 1
        return 1 / self.called


def half_life(step: int) -> float:
    return 0.5 ** (step / 10)


def asinh(prediction: Tensor, target: Tensor, scale: float = 1.0) -> Tensor:
    return torch.asinh((prediction - target).abs() / scale).mean()


class Learned(nn.Module):
    """A loss that has a parameter of its own."""

    def __init__(self, start: float = 1.0):
        super().__init__()
        self.width = nn.Parameter(torch.tensor(start))

    def forward(self, prediction: Tensor, target: Tensor) -> Tensor:
        return ((prediction - target) / self.width).square().mean() + self.width.log()


def make_loss(power: int = 2):
    return lambda prediction, target: (prediction - target).abs().pow(power).mean()


def without_target(prediction: Tensor) -> Tensor:
    return prediction.square().mean()


def bias(prediction: Tensor, target: Tensor) -> Tensor:
    return (prediction - target).mean()


def sawtooth(step: int, num_steps: int, teeth: int = 2) -> float:
    """A weight that rises again and again."""
    return (step * teeth / num_steps) % 1


class Late:
    """A weight that is 0 in the first half."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, step: int, num_steps: int) -> float:
        return self.value * (2 * step >= num_steps)


def counting(step: int, num_steps: int, seen: list[int] = []) -> float:  # noqa: B006
    """Another weight whenever it is asked for one."""
    seen.append(step)
    return float(len(seen))


def no_weight(step: int, num_steps: int) -> float:
    """Not finite."""
    return math.inf
