"""CPU threads: `auto` takes one where operations are small, all cores where they are large, and stays with that."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isoscale
from isoscale.data.generators import GENERATORS
from isoscale.engine import build, settings, threads
from isoscale.engine.settings import Decisions, Settings
from tests.helpers import QUIET, sha
from tests.ranks import on_ranks

CORES = 2


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(settings, "_own_cores", lambda: CORES)


def recipe(batch: int, steps: int = 1, **more: Any) -> dict[str, Any]:
    keys = {"data.batch_size": batch, "train.steps": steps, "train.epochs": None, "train.device": "cpu", **QUIET}
    return {**keys, **{key.replace("__", "."): value for key, value in more.items()}}


def decided(run: isoscale.Run | Path) -> dict[str, Any]:
    path = run.path if isinstance(run, isoscale.Run) else run
    return dict(json.loads((path / "run.json").read_text())["decided"])


class Recurrent(nn.Module):
    """The last state of a recurrent network."""

    def __init__(self, kind: type[nn.RNNBase], inputs: int, width: int) -> None:
        super().__init__()
        self.network = kind(inputs, width, batch_first=True)
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.network(x)[0][:, -1])


class Spectral(nn.Module):
    """Weights of frequencies."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, channels, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.einsum("bixy,ioxy->boxy", torch.fft.rfft2(x)[..., :4, :4], self.weight.to(torch.complex64))
        return torch.fft.irfft2(modes, s=x.shape[-2:]).mean((1, 2, 3))[:, None]


class Reused(nn.Linear):
    """A small layer that is applied to many pairs within each sample, which its shapes do not tell."""

    def forward(self, x: Tensor) -> Tensor:
        pairs = (x[:, :, None] - x[:, None, :])[..., None].expand(-1, -1, -1, self.in_features)
        return super().forward(pairs).mean((1, 2))[:, :1]


def wide(*widths: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(one, other) for one, other in pairwise(widths)))


def convolution(channels: int) -> nn.Module:
    layers = nn.Conv2d(1, channels, 3, padding=1), nn.Conv2d(channels, channels, 3, padding=1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1))


SMALL = {
    "linear": (lambda: wide(8, 1), 8, (8,)),
    "network": (lambda: wide(91, 100, 11, 1), 40, (91,)),
    "convolution": (lambda: convolution(4), 16, (1, 8, 8)),
    "gru of many steps": (lambda: Recurrent(nn.GRU, 16, 32), 16, (100, 16)),
    "lstm of many steps": (lambda: Recurrent(nn.LSTM, 16, 64), 64, (100, 16)),
    "fft": (lambda: Spectral(4), 8, (4, 16, 16)),
}
LARGE = {
    "wide": (lambda: wide(91, 400, 400, 1), 256, (91,)),
    "large batch": (lambda: wide(91, 100, 11, 1), 2048, (91,)),
    "convolution": (lambda: convolution(32), 32, (1, 28, 28)),
    "gru": (lambda: Recurrent(nn.GRU, 64, 256), 256, (5, 64)),
    "lstm": (lambda: Recurrent(nn.LSTM, 64, 256), 256, (5, 64)),
    "fft": (lambda: Spectral(16), 16, (16, 64, 64)),
    "reused": (lambda: Reused(8, 8), 32, (64,)),
}
CASES = [*((*case, 1) for case in SMALL.values()), *((*case, CORES) for case in LARGE.values())]
NAMES = [*(f"small {name}" for name in SMALL), *(f"large {name}" for name in LARGE)]


@pytest.mark.parametrize(("make", "batch", "shape", "expected"), CASES, ids=NAMES)
def test_small_operations_get_one_thread_and_large_ones_all_cores(make, batch, shape, expected, tmp_path: Path) -> None:
    data = {"input": torch.randn(batch, *shape), "target": torch.randn(batch, 1)}
    run = isoscale.Trainer({}, **recipe(batch), run=tmp_path / "run").fit(isoscale.Supervised(make(), "mse"), data)
    found = decided(run)
    assert (found["threads"], found["cores"]) == (expected, CORES)
    why = "are too small for more" if expected == 1 else "are worth all cores"
    assert found["threads_why"].endswith(why)
    said = f"cpu ({expected} thread{'s' * (expected > 1)}): {found['threads_why']}"
    assert said in (run.path / "log.txt").read_text()


class Bare(nn.Module):
    """A task with nothing but its network and a training step, which cannot be asked to predict."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.network(batch["input"]) - batch["target"]).square().mean()


class Unable(isoscale.Supervised):
    """A task that cannot predict."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("kind", [Bare, lambda network: Unable(network, "mse")], ids=["bare", "unable"])
@pytest.mark.parametrize(
    ("case", "expected"),
    [*((SMALL[name], 1) for name in ("linear", "network", "convolution", "gru of many steps", "lstm of many steps")),
     *((LARGE[name], CORES) for name in ("wide", "large batch", "convolution", "gru", "lstm"))],
)  # fmt: skip
def test_a_task_that_cannot_predict_is_judged_by_its_layers(kind, case, expected, tmp_path: Path) -> None:
    make, batch, shape = case
    data = {"input": torch.randn(batch, *shape), "target": torch.randn(batch, 1)}
    run = isoscale.Trainer({}, **recipe(batch), run=tmp_path / "run").fit(kind(make()), data)
    assert decided(run)["threads"] == expected


class Drawing(isoscale.Supervised):
    """A task that draws when it predicts, and counts its steps."""

    steps = 0

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return super().predict_step(batch, batch_idx) + torch.rand(())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)


def test_looking_at_a_step_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"input": torch.randn(32, 8), "target": torch.randn(32, 1)}
    states: list[Any] = []

    def settle(*given: Any) -> None:
        states.append([each.state() for each in GENERATORS])
        threads.settle_threads(*given)
        states.append([each.state() for each in GENERATORS])

    monkeypatch.setattr(build, "settle_threads", settle)
    trained = set()
    for name, keys in (("looked at", {}), ("asked", {"train__threads": 1})):
        torch.manual_seed(0)
        task = Drawing(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 1)), "mse")
        trained.add(sha(isoscale.Trainer({}, **recipe(8, 7, **keys), run=tmp_path / name).fit(task, data)))
        assert states[0] == states[1] and task.steps == 7
        states.clear()
    assert len(trained) == 1


@pytest.mark.parametrize(("keys", "threads"), [({"train.threads": 3}, 3), ({"parallel.reduce": "tree"}, 1)])
def test_what_is_asked_for_stays_whatever_the_size(keys: dict[str, Any], threads: int, tmp_path: Path) -> None:
    data = {"input": torch.randn(256, 91), "target": torch.randn(256, 1)}
    task = isoscale.Supervised(wide(91, 400, 400, 1), "mse")
    found = decided(isoscale.Trainer({}, **{**recipe(256), **keys}, run=tmp_path / "run").fit(task, data))
    assert (found["threads"], found["cores"], found["threads_why"]) == (threads, 0, "")


def test_what_the_environment_asks_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    made = Decisions.make(Settings())
    assert (made.threads, made.cores) == (2, 0)


def test_a_single_core_has_one_thread_without_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_own_cores", lambda: 1)
    made = Decisions.make(Settings())
    assert (made.threads, made.cores) == (1, 0)


SEEN: list[int] = []


class Threaded(isoscale.Supervised):
    """A task that writes down with how many threads its data is built and its steps are computed."""

    def check_data(self, name: str, source: Any) -> None:
        SEEN.append(torch.get_num_threads())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        SEEN.append(torch.get_num_threads())
        return super().training_step(batch, batch_idx)


def seen(path: Path, steps: int) -> list[int]:
    """Train, or go on, up to a step."""
    data = {"input": torch.linspace(0, 1, 512).view(64, 8), "target": torch.ones(64, 1)}
    SEEN.clear()
    isoscale.Trainer({}, **recipe(8, steps), run=path).fit(Threaded(nn.Linear(8, 1), "mse"), data)
    return SEEN.copy()


def test_a_run_goes_on_as_it_began_though_nobody_would_decide_so_now(tmp_path: Path, monkeypatch) -> None:
    for worth, steps in ((0.0, 3), (1e30, 6)):
        monkeypatch.setattr(threads, "WORTH_THREADS", worth)
        assert seen(tmp_path / "run", steps) == [2, 2, 2, 2]
    assert decided(tmp_path / "run")["threads"] == 2


def test_data_is_built_by_all_cores_at_every_start_of_a_run_with_small_steps(tmp_path: Path, monkeypatch) -> None:
    for cores, steps in ((2, 3), (4, 6)):
        monkeypatch.setattr(settings, "_own_cores", lambda cores=cores: cores)
        assert seen(tmp_path / "run", steps) == [2, 1, 1, 1]


def test_a_run_of_an_earlier_version_keeps_its_threads(tmp_path: Path) -> None:
    seen(tmp_path / "run", 3)
    file = tmp_path / "run" / "run.json"
    record = json.loads(file.read_text())
    del record["decided"]["cores"], record["decided"]["threads_why"]
    record["decided"]["threads"] = 2
    file.write_text(json.dumps(record))
    assert seen(tmp_path / "run", 6) == [2, 2, 2, 2]
    assert (decided(tmp_path / "run")["threads"], decided(tmp_path / "run")["cores"]) == (2, 0)


def looking(path: str) -> tuple[int, list[int]]:
    """Train as one of two ranks: how often it looked at the step, and with how many threads it began."""
    looked, settled = [], []
    work, settle = threads.typical_work, threads.settle_threads
    threads.typical_work = lambda parts: (looked.append(parts), work(parts))[1]

    def settling(decided: Decisions, *others: Any) -> None:
        decided.threads, decided.cores = 0, CORES  # though each of them may have but one
        settle(decided, *others)
        settled.append(torch.get_num_threads())

    build.settle_threads = settling
    isoscale.train("images/digits", run=path, **{**QUIET, "train.epochs": 1})
    return len(looked), settled


@pytest.mark.slow
def test_the_first_of_several_ranks_decides_for_all(tmp_path: Path) -> None:
    assert on_ranks(2, looking, str(tmp_path / "run")) == [(1, [1]), (0, [1])]
    assert decided(tmp_path / "run")["threads"] == 1
