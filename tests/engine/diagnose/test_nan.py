"""Why a training broke down: step, samples, layer and operation, found by running the steps again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import isoscale
from isoscale.engine.diagnose.trace import Tracer
from isoscale.engine.metrics.windows import NotFinite
from tests.helpers import QUIET

pytestmark = pytest.mark.slow


class Net(nn.Module):
    """Two layers, and something in between that may break down."""

    def __init__(self, between: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, 16)
        self.between = between
        self.last = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(self.between(x))))


class Function(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)


def plain(x: Tensor) -> Tensor:
    return x


def log_of_first(x: Tensor) -> Tensor:
    return torch.cat([torch.log(x[:, :1]), x[:, 1:]], 1)


def masked_log(x: Tensor) -> Tensor:
    """Infinities that are meant, as attention has them, before one that is not."""
    mask = torch.where(x > 0.5, 0.0, -torch.inf)
    return torch.softmax(torch.cat([mask + log_of_first(x), x[:, 1:2]], 1), 1)[:, :4]


def overflow(x: Tensor) -> Tensor:
    grown = torch.exp(1000 * torch.relu(x - 1))
    return grown / grown


def data(**planted: float) -> isoscale.Sources:
    """256 samples between 0.1 and 0.9; `planted` are first values by sample number."""
    generator = torch.Generator().manual_seed(0)
    inputs = 0.1 + 0.8 * torch.rand(256, 4, generator=generator)
    for number, value in planted.items():
        inputs[int(number.removeprefix("at_")), 0] = value
    return isoscale.Sources(train={"input": inputs, "target": inputs.sum(1, keepdim=True)})


def broken(tmp_path: Path, between: Any, sources: isoscale.Sources, **overrides: Any) -> tuple[str, dict[str, Any]]:
    """Train until it breaks down: the message and the report."""
    keys = {"train.epochs": 3, "data.batch_size": 16, "observe.every": 4, "checkpoint.every": "4 steps", **QUIET}
    keys.update({key.replace("__", "."): value for key, value in overrides.items()})
    torch.manual_seed(0)
    task = isoscale.Supervised(Net(Function(between)), loss="mse")
    with pytest.raises(NotFinite) as caught:
        isoscale.Trainer(run=tmp_path / "run", **keys).fit(task, sources)
    reports = list((tmp_path / "run" / "not_finite").glob("step_*/report.json"))
    return str(caught.value), json.loads(reports[0].read_text()) if reports else {}


def step_of(sources: isoscale.Sources, sample: int, tmp_path: Path) -> int:
    """The step of the first epoch that sees a sample."""
    seen: list[list[int]] = []

    class Spy(isoscale.Task):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            seen.append(batch["number"].tolist())
            return self.weight * 1.0

    numbered = {**sources.train.tensors, "number": torch.arange(len(sources.train))}
    keys = {"train.epochs": 1, "data.batch_size": 16, **QUIET}
    isoscale.Trainer(run=tmp_path / "spy", **keys).fit(Spy(), isoscale.Sources(train=numbered))
    return 1 + next(step for step, numbers in enumerate(seen) if sample in numbers)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])  # one leaves the weights alone after a NaN, the other not
def test_a_bad_operation_is_named_with_its_step_sample_layer_and_line(optimizer: str, tmp_path: Path) -> None:
    sources = data(at_99=-1.0)
    message, report = broken(tmp_path, log_of_first, sources, optimizer__name=optimizer)
    assert report["step"] == step_of(sources, 99, tmp_path) and report["epoch"] == 1
    assert report["samples"] == [99] and report["told_apart"] and report["places"] == ["sample 99"]
    origin = report["origin"]
    assert (origin["operation"], origin["layer"], origin["phase"]) == ("log", "model.between", "forward")
    assert "test_nan.py" in origin["line"] and "torch.log(x[:, :1])" in origin["line"]
    for words in (f"step {report['step']}, epoch 1: log made NaN", "layer model.between", "sample 99 of the training"):
        assert words in message


def test_the_replay_begins_at_the_last_checkpoint(tmp_path: Path) -> None:
    sources = data(at_99=-1.0)
    step = step_of(sources, 99, tmp_path)
    assert step > 4, "or else there is no checkpoint before it"
    _, report = broken(tmp_path, log_of_first, sources)
    assert report["replayed_from"] == (step - 1) // 4 * 4


def test_bad_data_is_called_bad_data(tmp_path: Path) -> None:
    message, report = broken(tmp_path, plain, data(at_7=float("nan"), at_200=float("inf")))
    assert report["origin"]["kind"] == "data" and report["origin"]["name"] == "input"
    assert report["samples"] in ([7], [200]) and "the data itself holds" in message
    assert report["origin"]["entered"]["layer"] == "model.first"


def test_infinities_that_are_meant_are_not_blamed(tmp_path: Path) -> None:
    _, report = broken(tmp_path, masked_log, data(at_99=-1.0))
    assert report["origin"]["operation"] == "log" and report["samples"] == [99]


def test_an_overflow_is_blamed_and_not_the_division_that_makes_nan_of_it(tmp_path: Path) -> None:
    message, report = broken(tmp_path, overflow, data(at_99=5.0))
    assert report["origin"]["operation"] == "exp" and report["origin"]["value"] == "infinity"
    assert report["origin"]["became_nan"]["operation"] == "div" and report["samples"] == [99]
    assert "became NaN in layer model.between (div)" in message


class Root(nn.Module):
    """Its value is finite at zero, its gradient is not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, torch.sqrt(x * self.scale), 0.0)


@pytest.mark.parametrize("options", [{}, {"parallel__reduce": "tree", "train__accumulate": 2}])
def test_a_nan_that_only_the_backward_pass_makes_is_found(options: dict[str, Any], tmp_path: Path) -> None:
    message, report = broken(tmp_path, Root(), data(at_99=0.0), **options)
    origin = report["origin"]
    assert (origin["phase"], origin["backward_of"], origin["layer"]) == ("backward", "sqrt", "model.between._function")
    assert report["samples"] == [99] and "in the backward pass of sqrt" in message


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "rmsprop"])
def test_weights_that_grew_are_blamed_and_not_a_sample(optimizer: str, tmp_path: Path) -> None:
    message, report = broken(tmp_path, plain, data(), optimizer__name=optimizer, optimizer__lr=1e22)
    assert report["weights_grew"] and report["largest_weight"]["value"] > 1e6
    assert (
        "the weights had grown" in message
        and "smaller optimizer.lr" in message
        and "sample" not in message.split("had grown")[1]
    )


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_a_given_task_without_any_checkpoint_is_explained_as_far_as_it_can_be(optimizer: str, tmp_path: Path) -> None:
    options = {"checkpoint__every": "never", "optimizer__name": optimizer}
    message, report = broken(tmp_path, log_of_first, data(at_99=-1.0), **options)
    if optimizer == "adam":  # fused: the weights of the bad step are still there
        assert report["samples"] == [99] and report["origin"]["operation"] == "log"
    else:
        assert "was NaN already" in message


def test_without_a_checkpoint_the_steps_before_the_bad_one_leave_its_weights_alone(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    class Spy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            if bool((x < 0).any()):
                seen.append(self.scale.detach().clone())
            return log_of_first(x) * self.scale

    broken(tmp_path, Spy(), data(at_99=-1.0), checkpoint__every="never", observe__every=16, optimizer__lr=0.1)
    (path,) = (tmp_path / "run" / "not_finite").glob("*/weights.safetensors")
    assert len(seen) == 3, "in the run, in the replay and under the watch"
    assert all(torch.equal(scale, load_file(path)["model.between._function.scale"]) for scale in seen)


def test_a_fault_that_does_not_come_again_is_said_so(tmp_path: Path) -> None:
    calls = []

    def once(x: Tensor) -> Tensor:
        calls.append(x)
        return x * torch.nan if len(calls) == 6 else x

    message, report = broken(tmp_path, once, data(), train__device="cpu")
    assert "the cause was not found: steps 5 to 8, run again one by one, were all finite" in message and not report
    assert len(calls) < 16, "8 steps, 4 of them again, and a look at the model before; no step after the last one"


def test_a_failure_of_the_diagnosis_does_not_hide_the_breakdown(tmp_path: Path) -> None:
    def unreliable(x: Tensor) -> Tensor:
        if bool((x < 0).any()):
            if (tmp_path / "seen").exists():
                raise RuntimeError("not again")
            (tmp_path / "seen").touch()
        return log_of_first(x)

    message, _ = broken(tmp_path, unreliable, data(at_99=-1.0))
    assert "became NaN or infinite between step" in message and "RuntimeError: not again" in message


def test_the_reproducer_holds_the_guilty_part_and_the_weights_before_the_step(tmp_path: Path) -> None:
    broken(tmp_path, log_of_first, data(at_99=-1.0), train__accumulate=4)
    folder = next((tmp_path / "run" / "not_finite").iterdir())
    assert {path.name for path in folder.iterdir()} == {
        "batch.safetensors", "weights.safetensors", "report.json", "reproduce.py",
    }  # fmt: skip
    batch = load_file(folder / "batch.safetensors")
    assert len(batch["samples"]) == 4 and 99 in batch["samples"].tolist()
    assert batch["batch.input"][batch["samples"].tolist().index(99), 0] == -1
    weights = load_file(folder / "weights.safetensors")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values()) and "model.first.weight" in weights


def test_a_step_under_the_watch_has_the_bits_of_one_that_is_not() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), torch.rand(16, 4)
    net(x).sum().backward()
    before = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    with Tracer(net) as watch:
        watch.begin({"input": x}, torch.arange(16))
        net(x).sum().backward()
    assert all(torch.equal(one, two.grad) for one, two in zip(before, net.parameters(), strict=True))
    assert watch.blamed is None and not nn.modules.module._global_forward_hooks


def test_rows_of_the_gradient_of_a_weight_are_not_mistaken_for_samples() -> None:
    net, x = nn.Linear(4, 16), torch.rand(16, 4)
    nn.init.constant_(net.weight, 0.01)
    x[3:5] = 3e38
    with Tracer(net) as watch:
        watch.begin({"input": x}, torch.arange(16))
        watch.mark("data")
        output = net(x)
        assert bool(torch.isfinite(output).all())
        output.backward(torch.ones(16, 16))
        watch.look_at([net.weight.grad])
    assert watch.blamed and watch.blamed.where.operation == "mm" and watch.blamed.phase == "backward"
    assert watch.blamed.rows is None


def test_rows_of_weights_are_not_mistaken_for_samples() -> None:
    net = nn.Linear(4, 16)
    with Tracer(net) as watch:
        watch.begin({"input": torch.rand(16, 4)}, torch.arange(16))
        bad = net.weight.detach() / 0.0
        watch.look_at([bad])
    assert watch.blamed and watch.blamed.where.operation == "div" and watch.blamed.rows is None
