"""Models, optimizers and habits that users bring, on a real CUDA device: captured, and to the bits of eager steps."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import Dataset

import isoscale
from isoscale.errors import UserError
from isoscale.runs.open import Given, open_run
from isoscale.runs.session import Session

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BASE: dict[str, Any] = {
    "data": {"batch_size": 64},
    "train": {"steps": 90, "epochs": None, "precision": "32"},
    "observe": {"every": 10, "tensorboard": 0, "level": "warning"},
    "checkpoint": {"every": "never"},
}


def recipe(**train: Any) -> dict[str, Any]:
    return {**BASE, "train": {**BASE["train"], **train}}


def data(num_samples: int = 1000) -> isoscale.Sources:
    rows = torch.randn(num_samples, 13, generator=torch.Generator().manual_seed(0))
    target = rows[:, :2].sin().sum(1, keepdim=True)
    return isoscale.Sources(
        train={"input": rows, "target": target}, val={"input": rows[:100], "target": target[:100]}
    )  # fmt: skip


def fit(path: Path, made: nn.Module, given: Any = None, **train: Any) -> isoscale.Run:
    return isoscale.Trainer(recipe(**train), run=path).fit(made, given if given is not None else data())


def sha(run: isoscale.Run) -> str:
    return str(run.summary()["weights_sha256"])


def program(run: isoscale.Run) -> str:
    return str(run.record["decided"]["program"])


def history(run: isoscale.Run) -> dict[str, list[tuple[int, float]]]:
    return {name: run.history(name) for name in run.metrics if not name.startswith("time/")}


def log(path: Path) -> str:
    return (path / "log.txt").read_text()


def both(tmp_path: Path, make: Any, given: Any = None) -> tuple[isoscale.Run, isoscale.Run]:
    """The same training, eager and as it is by default; both must come to the same bits, the second captured."""
    eager = fit(tmp_path / "eager", make(), given, program="eager")
    auto = fit(tmp_path / "auto", make(), given)
    assert program(auto) == "graphed", log(tmp_path / "auto")
    assert sha(auto) == sha(eager)
    assert history(auto) == history(eager)
    return eager, auto


class Own(isoscale.Task):
    """A task that configures its own optimizer."""

    def __init__(self, configure: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.body = nn.Sequential(nn.Linear(13, 32), nn.Tanh(), nn.Dropout(0.1))
        self.head = nn.Linear(32, 1)
        self._configure = configure

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.body(rows))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self(batch["input"]), batch["target"])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self(batch["input"]), batch["target"])

    def configure_optimizers(self) -> Any:
        return self._configure(self)


class Signed(torch.optim.Optimizer):
    """An optimizer of somebody's own, which reads its learning rate on the host."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad.sign(), alpha=-group["lr"])


def _with(optimizer: Any, scheduler: Any, interval: str = "step", **options: Any) -> Any:
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval, **options}}


def _adam(task: Any, **options: Any) -> Any:
    return torch.optim.Adam(task.parameters(), lr=1e-2, **options)


def _sgd(task: Any, **options: Any) -> Any:
    return torch.optim.SGD(task.parameters(), lr=1e-2, momentum=0.9, **options)


def _one_cycle(optimizer: Any) -> Any:
    return _with(optimizer, schedulers.OneCycleLR(optimizer, 0.05, total_steps=100))


def _groups(task: Any) -> Any:
    groups = [{"params": task.body.parameters()}, {"params": task.head.parameters(), "lr": 0.1, "weight_decay": 0.01}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    return _with(optimizer, schedulers.LambdaLR(optimizer, [lambda step: 0.99**step, lambda step: 1 / (1 + step)]))


def _sequence(task: Any) -> Any:
    optimizer = _adam(task)
    warmup = schedulers.LinearLR(optimizer, 0.1, total_iters=20)
    return _with(
        optimizer, schedulers.SequentialLR(optimizer, [warmup, schedulers.ExponentialLR(optimizer, 0.9)], [20])
    )


CONFIGURED: dict[str, Any] = {
    "adam": _adam,
    "adam foreach": lambda task: _adam(task, foreach=True),
    "adam, a step schedule": lambda task: _with(each := _adam(task), schedulers.CosineAnnealingLR(each, 90)),
    "adam, an epoch schedule": lambda task: _with(each := _adam(task), schedulers.StepLR(each, 2), "epoch"),
    "adam, every third step": lambda task: _with(each := _adam(task), schedulers.ExponentialLR(each, 0.9), frequency=3),
    "adam, one cycle": lambda task: _one_cycle(_adam(task)),
    "adamw, one cycle": lambda task: _one_cycle(torch.optim.AdamW(task.parameters(), weight_decay=0.1)),
    "sgd": _sgd,
    "sgd, one cycle": lambda task: _one_cycle(_sgd(task)),
    "sgd nesterov, one cycle": lambda task: _one_cycle(_sgd(task, nesterov=True, weight_decay=1e-3)),
    "plateau": lambda task: _with(
        each := _adam(task), schedulers.ReduceLROnPlateau(each, patience=0), "epoch", monitor="val/loss"
    ),
    "groups": _groups,
    "one after the other": _sequence,
    "rmsprop": lambda task: torch.optim.RMSprop(task.parameters(), lr=1e-3),
    "of one's own": lambda task: Signed(task.parameters(), lr=1e-3),
}


@pytest.mark.parametrize("name", CONFIGURED)
def test_an_optimizer_that_the_task_configures_is_captured(name: str, tmp_path: Path) -> None:
    both(tmp_path, lambda: Own(CONFIGURED[name]))


@pytest.mark.parametrize("name", ["adam, one cycle", "groups", "plateau"])
def test_a_captured_run_with_an_optimizer_of_its_own_goes_on_to_the_same_bits(name: str, tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", Own(CONFIGURED[name]))
    fit(tmp_path / "run", Own(CONFIGURED[name]), steps=47)
    again = fit(tmp_path / "run", Own(CONFIGURED[name]))
    assert program(again) == "graphed"
    assert sha(again) == sha(whole)


def test_a_rate_that_moves_and_is_read_on_the_host_is_said(tmp_path: Path) -> None:
    def configure(task: Any) -> Any:
        optimizer = Signed(task.parameters(), lr=1e-3)
        return _with(optimizer, schedulers.ExponentialLR(optimizer, 0.9))

    run = fit(tmp_path / "auto", Own(configure))
    assert program(run) == "eager"
    with pytest.raises(UserError, match="Signed reads its learning rate on the host"):
        fit(tmp_path / "graphed", Own(configure), program="graphed")


class Hooked(Own):
    """Has hooks before, in and after its steps."""

    def __init__(self) -> None:
        super().__init__(_adam)
        self.losses: list[float] = []
        self.sums: list[float] = []
        self.strength = 1.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.sums.append(float(batch["input"].sum()))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "input": batch["input"] * 0.5}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.strength

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", torch.stack([each.grad.norm() for each in self.parameters()]).norm())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.log("batch_sum", batch["input"].sum())

    def on_train_epoch_start(self) -> None:
        self.strength *= 0.9


def test_hooks_around_a_batch_are_called_for_every_replay(tmp_path: Path) -> None:
    made = {name: Hooked() for name in ("eager", "auto")}
    runs = [
        fit(tmp_path / "eager", made["eager"], program="eager"),
        fit(tmp_path / "auto", made["auto"]),
    ]
    assert program(runs[1]) == "graphed", log(tmp_path / "auto")
    assert sha(runs[0]) == sha(runs[1])
    assert history(runs[0]) == history(runs[1])
    assert made["auto"].losses == made["eager"].losses and len(made["auto"].losses) == 90
    assert made["auto"].sums == made["eager"].sums


class Noisy(Own):
    """Draws from torch's generator on the device, as samplers of points do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noisy = batch["input"] + 0.1 * torch.randn_like(batch["input"])
        return super().training_step({**batch, "input": noisy}, batch_idx)


def test_a_step_that_draws_on_the_device_is_captured(tmp_path: Path) -> None:
    both(tmp_path, lambda: Noisy(_adam))


class Rows(Dataset):  # type: ignore[type-arg]
    """Samples one by one."""

    def __init__(self, widths: tuple[int, ...] = (13,)) -> None:
        self.rows = torch.randn(500, 64, generator=torch.Generator().manual_seed(0))
        self.widths = widths

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index, :13]
        return {"input": row + 0.1 * torch.randn(13), "target": row[:1].sin(), "name": f"row {index}"}


def test_steps_on_a_dataset_that_is_read_sample_by_sample_are_captured(tmp_path: Path) -> None:
    both(tmp_path, lambda: Own(_adam), isoscale.Sources(train=Rows()))


class Sequences(Rows):
    """Samples of any length."""

    def __getitem__(self, index: int) -> Any:
        return {"input": self.rows[index, : 8 + index % 50]}


def together(samples: list[Any]) -> Any:
    """Cut to the shortest."""
    shortest = min(len(sample["input"]) for sample in samples)
    return {"input": torch.stack([sample["input"][:shortest] for sample in samples])}


class Mean(isoscale.Task):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return ((self.scale * batch["input"]).mean(1) - 1).square().mean()


class Asking(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if loss > 1e9:
            loss = 2 * loss
        return loss


class Printing(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        print(loss)
        return loss


class PrintingWords(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        print("a step")
        return super().training_step(batch, batch_idx)


class DrawingOnHost(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({**batch, "input": batch["input"] * float(torch.rand(()))}, batch_idx)


class DrawingByNumpy(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({**batch, "input": batch["input"] * np.random.beta(1, 1)}, batch_idx)


class DrawingByPython(Own):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step({**batch, "input": batch["input"] * random.random()}, batch_idx)


class Choosing(Own):
    def __init__(self, configure: Any) -> None:
        super().__init__(configure)
        self.body[2] = nn.Identity()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        chosen = batch["input"][:, 0] > 0
        return super().training_step({key: value[chosen] for key, value in batch.items()}, batch_idx)


class Warming(Own):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
        optimizer.step(closure)


UNFIT = [
    (Asking, "test_any_model.py, line", "if loss > 1e9:"),
    (Printing, "test_any_model.py, line", "print(loss)"),
    (PrintingWords, "training_step prints", "self.log"),
    (DrawingOnHost, "draws random numbers on the host", "on the device"),
    (DrawingByNumpy, "draws random numbers on the host", "on the device"),
    (DrawingByPython, "draws random numbers on the host", "on the device"),
    (Choosing, "test_any_model.py, line", "value[chosen]"),
    (Warming, "optimizer_step runs on the host", "scheduler"),
]


@pytest.mark.parametrize(("cls", "why", "what"), UNFIT)
def test_what_cannot_be_captured_is_said_in_one_line_and_trains_on(
    cls: Any, why: str, what: str, tmp_path: Path
) -> None:
    random.seed(0)
    run = fit(tmp_path / "auto", cls(_adam))
    assert program(run) == "eager"
    assert run.summary()["step"] == 90
    assert why in run.record["decided"]["why"] and what in run.record["decided"]["why"]
    with pytest.raises(UserError, match=why):
        fit(tmp_path / "graphed", cls(_adam), program="graphed")


def test_shapes_that_change_in_every_step_are_said_in_one_line(tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader(Sequences(), batch_size=8, shuffle=True, collate_fn=together)
    run = fit(tmp_path, Mean(), loader, steps=120)
    assert program(run) in ("eager", "graphed")
    assert run.summary()["step"] == 120
    if program(run) == "eager":
        assert "the shapes of batches change" in run.record["decided"]["why"]


@pytest.mark.parametrize("ema", [None, 0.9])
def test_an_evaluation_that_is_made_again_is_captured(ema: float | None, tmp_path: Path) -> None:
    """Of 100 samples, 64 are one batch and 36 another."""
    choice = recipe(evaluate="10 steps", ema=ema)
    session = Session(open_run(choice, {}, tmp_path / "auto", Given(Own(_adam), data())))
    session.train()
    assert session.trainer is not None
    graphed = session.trainer.evaluations._graphed
    assert graphed is not None and graphed.refused is None
    assert [each.proven for each in graphed._graphs.values()] == [True, True]
    eager = fit(tmp_path / "eager", Own(_adam), program="eager", evaluate="10 steps", ema=ema)
    assert history(isoscale.Run(tmp_path / "auto"))["val/loss"] == history(eager)["val/loss"]


class Messages(isoscale.Task):
    """Passes messages by `index_add_`, whose fast kernel adds in any order."""

    def __init__(self, configure: Any = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one, self.two = nn.Linear(13, 64), nn.Linear(64, 1)
        self.register_buffer("goal", torch.randint(0, 64, (4096,), generator=torch.Generator().manual_seed(2)))
        self.register_buffer("origin", torch.randint(0, 64, (4096,), generator=torch.Generator().manual_seed(3)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        nodes = torch.tanh(self.one(batch["input"]))
        sums = torch.zeros_like(nodes).index_add_(0, self.goal % len(nodes), nodes[self.origin % len(nodes)])
        return nn.functional.mse_loss(self.two(sums / 64), batch["target"])


def test_sums_over_indices_are_captured_by_default(tmp_path: Path) -> None:
    both(tmp_path, Messages)


class Pooled(Own):
    """Has a pooling whose backward pass has no deterministic kernel."""

    def forward(self, rows: Tensor) -> Tensor:
        cubes = self.body(rows).view(-1, 1, 2, 4, 4)
        return self.head(nn.functional.max_pool3d(cubes, 2, stride=1, padding=1)[..., :2, :4, :4].reshape(-1, 32))


def test_an_operation_without_a_deterministic_kernel_is_named(tmp_path: Path) -> None:
    run = fit(tmp_path / "auto", Pooled(_adam))
    assert run.record["decided"]["kernels"] == "lenient"
    line = next(line for line in log(tmp_path / "auto").splitlines() if "no deterministic kernel" in line)
    assert "max_pool3d_with_indices_backward" in line and "bits" in line
    assert program(run) == "graphed"
    with pytest.raises(UserError, match=r"max_pool3d_with_indices_backward.*train\.deterministic=auto"):
        fit(tmp_path / "true", Pooled(_adam), deterministic=True)
    fastest = fit(tmp_path / "false", Pooled(_adam), deterministic=False)
    assert "fastest kernels" in log(tmp_path / "false") and program(fastest) == "graphed"


class Images(isoscale.Task):
    """A small network of convolutions, in 1, 2 or 3 dimensions."""

    def __init__(self, dims: int, by_view: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        conv = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
        norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dims]
        self.net = nn.Sequential(conv(1, 16, 3, padding=1), norm(16), nn.ReLU(), conv(16, 8, 3, padding=1))
        self.head = nn.LazyLinear(1)
        self._shape = {1: (64,), 2: (8, 8), 3: (4, 4, 4)}[dims]
        self._by_view = by_view
        self.head(torch.zeros(1, 8 * 64))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = self.net(batch["input"].view(-1, 1, *self._shape))
        flat = found.view(len(found), -1) if self._by_view else found.flatten(1)
        return nn.functional.mse_loss(self.head(flat), batch["target"])


def images() -> isoscale.Sources:
    rows = torch.randn(500, 64, generator=torch.Generator().manual_seed(0))
    return isoscale.Sources(train={"input": rows, "target": rows[:, :1]})


@pytest.mark.parametrize("by_view", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_convolutions_are_stored_channels_last_where_the_task_allows_it(
    dims: int, by_view: bool, tmp_path: Path
) -> None:
    whole = fit(tmp_path / "whole", Images(dims, by_view), images(), precision="tf32")
    assert program(whole) == "graphed"
    assert whole.record["decided"]["memory_format"] == ("contiguous" if by_view and dims > 1 else "channels_last")
    fit(tmp_path / "run", Images(dims, by_view), images(), precision="tf32", steps=31)
    assert sha(fit(tmp_path / "run", Images(dims, by_view), images(), precision="tf32")) == sha(whole)


class Attentive(isoscale.Task):
    """Attention, whose fast backward pass is deterministic only if it is told to be."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(64, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(
            self.head(self.layer(batch["input"].view(-1, 1, 64).repeat(1, 128, 1))).mean(1), batch["target"]
        )


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_attention_has_the_same_bits_in_every_start(precision: str, tmp_path: Path) -> None:
    runs = [fit(tmp_path / str(number), Attentive(), images(), precision=precision) for number in range(3)]
    assert {program(run) for run in runs} == {"graphed"}
    assert len({sha(run) for run in runs}) == 1
