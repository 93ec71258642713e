"""Models that no preset has, beside a loop and a graph written by hand: time of a step on a CUDA device.

    python benchmarks/any_model.py [NAME …] [--hashes] [--out FILE]

Each side runs in a process of its own, because torch keeps the first kernel that it has chosen. The loop and the graph
by hand take the fastest kernels (cudnn.benchmark, no deterministic ones); isoscale runs as it is by default. With
--hashes, every model is trained in ten processes at once, and once more, stopped and continued: the weights are
compared.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_TIMED = 200
Batch = dict[str, Tensor]


class Physics(nn.Module):
    """A network whose second derivatives must obey an equation of heat."""

    def __init__(self) -> None:
        super().__init__()
        widths = [2, 64, 64, 64, 64, 1]
        pairs = pairwise(widths)
        layers = [each for pair in pairs for each in (nn.Linear(*pair), nn.Tanh())][:-1]
        self.net = nn.Sequential(*layers)

    def loss(self, batch: Batch) -> Tensor:
        points = batch["input"].requires_grad_()
        value = self.net(points)
        (slope,) = torch.autograd.grad(value.sum(), points, create_graph=True)
        (second,) = torch.autograd.grad(slope[:, 0].sum(), points, create_graph=True)
        residual = slope[:, 1] - 0.1 * second[:, 0]
        return residual.square().mean() + (value[:, 0] - batch["target"]).square().mean()


class Messages(nn.Module):
    """Message passing over random graphs, by `index_add_`."""

    def __init__(self, num_nodes: int = 1024, num_edges: int = 8192) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 128)
        self.layers = nn.ModuleList(nn.Linear(256, 128) for _ in range(4))
        self.head = nn.Linear(128, 1)
        generator = torch.Generator().manual_seed(1)
        self.register_buffer("origin", torch.randint(0, num_nodes, (num_edges,), generator=generator))
        self.register_buffer("goal", torch.randint(0, num_nodes, (num_edges,), generator=generator))

    def loss(self, batch: Batch) -> Tensor:
        nodes = self.embed(batch["input"])
        for layer in self.layers:
            messages = F.silu(layer(torch.cat([nodes[self.origin], nodes[self.goal]], 1)))
            nodes = nodes + torch.zeros_like(nodes).index_add_(0, self.goal, messages) / 8
        return F.mse_loss(self.head(nodes)[:, 0], batch["target"])


class Volumes(nn.Module):
    """A 3-D U-Net with strided convolutions of width 4, from fields to fields."""

    def __init__(self, channels: tuple[int, ...] = (64, 128, 256, 512, 512), fields: int = 4) -> None:
        super().__init__()
        pairs = list(zip((fields, *channels[:-1]), channels, strict=True))
        self.encoder = nn.ModuleList(nn.Conv3d(a, b, 4, stride=2, padding=1) for a, b in pairs)
        self.norms = nn.ModuleList(nn.BatchNorm3d(b) for _, b in pairs)
        ups = [(b if number == 0 else 2 * b, a) for number, (a, b) in enumerate(reversed(pairs))]
        self.decoder = nn.ModuleList(nn.ConvTranspose3d(a, b, 4, stride=2, padding=1) for a, b in ups)

    def forward(self, values: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for layer, norm in zip(self.encoder, self.norms, strict=True):
            values = F.leaky_relu(norm(layer(values)), 0.2)
            skips.append(values)
        skips.pop()
        for layer in self.decoder:
            values = layer(F.relu(values))
            if skips:
                values = torch.cat([values, skips.pop()], 1)
        return values

    def loss(self, batch: Batch) -> Tensor:
        return F.mse_loss(self(batch["input"]).float(), batch["target"])


class Attention(nn.Module):
    """A transformer of 3 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
        self.embed, self.body, self.head = nn.Linear(16, 256), nn.TransformerEncoder(layer, 4), nn.Linear(256, 1)

    def loss(self, batch: Batch) -> Tensor:
        return F.mse_loss(self.head(self.body(self.embed(batch["input"])).mean(1))[:, 0].float(), batch["target"])


class Fourier(nn.Module):
    """A Fourier neural operator in two dimensions, with complex weights."""

    def __init__(self, width: int = 32, modes: int = 12) -> None:
        super().__init__()
        self.modes = modes
        self.lift, self.lower = nn.Conv2d(1, width, 1), nn.Conv2d(width, 1, 1)
        self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(4))
        shape = (2, width, width, modes, modes)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(*shape, dtype=torch.cfloat) / width) for _ in range(4))

    def loss(self, batch: Batch) -> Tensor:
        values, count = self.lift(batch["input"]), self.modes
        for local, weight in zip(self.local, self.weights, strict=True):
            found = torch.fft.rfft2(values)
            mixed = torch.zeros_like(found)
            mixed[:, :, :count, :count] = torch.einsum("bixy,ioxy->boxy", found[:, :, :count, :count], weight[0])
            mixed[:, :, -count:, :count] = torch.einsum("bixy,ioxy->boxy", found[:, :, -count:, :count], weight[1])
            values = F.gelu(torch.fft.irfft2(mixed, s=values.shape[-2:]) + local(values))
        return F.mse_loss(self.lower(values), batch["target"])


class Waves(nn.Module):
    """A residual network of 1-D convolutions, for signals."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv1d(3, width, 7, padding=3), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(width, width, 3, padding=2**k, dilation=2**k), nn.BatchNorm1d(width), nn.ReLU(),
                nn.Conv1d(width, width, 1),
            )
            for k in range(8)
        )  # fmt: skip

    def loss(self, batch: Batch) -> Tensor:
        values = self.stem(batch["input"])
        for block in self.blocks:
            values = values + block(values)
        return F.mse_loss(self.head(values.mean(2))[:, 0].float(), batch["target"])


class Depthwise(nn.Module):
    """A ConvNeXt-like network of depthwise convolutions."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, width, 4, stride=4), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 7, padding=3, groups=width), nn.GroupNorm(1, width),
                nn.Conv2d(width, 4 * width, 1), nn.GELU(), nn.Conv2d(4 * width, width, 1),
            )
            for _ in range(6)
        )  # fmt: skip

    def loss(self, batch: Batch) -> Tensor:
        values = self.stem(batch["input"])
        for block in self.blocks:
            values = values + block(values)
        return F.mse_loss(self.head(values.mean((2, 3)))[:, 0].float(), batch["target"])


class Kind:
    """A model, its data and how it is trained."""

    def __init__(
        self, make: Callable[[], nn.Module], shape: tuple[int, ...], batch: int, samples: int,
        target: tuple[int, ...] = (), precision: str = "tf32", lightning: bool = False, steps: int = NUM_TIMED,
    ) -> None:  # fmt: skip
        self.make, self.shape, self.batch, self.samples = make, shape, batch, samples
        self.target, self.precision, self.lightning, self.steps = target, precision, lightning, steps

    def data(self) -> Batch:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(self.samples, *self.shape, generator=generator)
        return {"input": rows, "target": torch.randn(self.samples, *self.target, generator=generator)}


KINDS = {
    "PINN, LightningModule": Kind(Physics, (2,), 1000, 20_000, lightning=True),
    "message passing": Kind(Messages, (16,), 1024, 20_480),
    "3-D U-Net 64³": Kind(Volumes, (4, 64, 64, 64), 64, 128, (4, 64, 64, 64), "bf16", steps=40),
    "transformer, 3 M": Kind(Attention, (128, 16), 64, 1280, precision="bf16"),
    "Fourier operator": Kind(Fourier, (1, 64, 64), 32, 640, (1, 64, 64)),
    "1-D convolutions": Kind(Waves, (3, 2048), 64, 1280, precision="bf16"),
    "depthwise 2-D": Kind(Depthwise, (3, 128, 128), 64, 640, precision="bf16"),
}


def network(kind: Kind) -> nn.Module:
    torch.manual_seed(0)
    return kind.make()


def by_hand(kind: Kind, captured: bool) -> tuple[float, float]:
    """Seconds of a step, and until the first timed one."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("high")
    began = time.perf_counter()
    model = network(kind).cuda()
    data = {name: tensor.cuda() for name, tensor in kind.data().items()}
    is_complex = any(each.is_complex() for each in model.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=not is_complex, capturable=captured)
    order = torch.randperm(kind.samples, device="cuda")
    static = {name: tensor[: kind.batch].clone() for name, tensor in data.items()}

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=kind.precision == "bf16", cache_enabled=not captured):
            loss = model.loss({name: tensor.detach() for name, tensor in static.items()})
        loss.backward()
        optimizer.step()

    def fetch(number: int) -> None:
        start = number * kind.batch % (kind.samples - kind.batch + 1)
        for name, tensor in static.items():
            torch.index_select(data[name], 0, order[start : start + kind.batch], out=tensor)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for number in range(5):
            fetch(number)
            step()
        run: Callable[[], Any] = step
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                step()
            run = graph.replay
        torch.cuda.synchronize()
        ready = time.perf_counter() - began
        times = []
        for repeat in range(3):
            start = time.perf_counter()
            for number in range(kind.steps):
                fetch(number + repeat)
                run()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) / kind.steps)
    return min(times), ready


def by_isoscale(kind: Kind, steps: int = 0, stop: int = 0) -> dict[str, Any]:
    """Trained as it is by default."""
    import isoscale

    model = network(kind)
    if kind.lightning:
        import lightning

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                loss = self.model.loss(batch)
                self.log("loss", loss)
                return loss

            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.Adam(self.parameters(), lr=1e-4)
                scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9999)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        task: Any = Module()
    else:

        class Task(isoscale.Task):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                return self.model.loss(batch)

        task = Task()
    count = steps or 4 * kind.steps
    recipe = {
        "data": {"batch_size": kind.batch},
        "optimizer": {"lr": 1e-4},
        "train": {"steps": stop or count, "epochs": None, "precision": kind.precision},
        "observe": {"every": 20, "tensorboard": 0, "level": "error"},
        "checkpoint": {"every": "never"},
    }
    with tempfile.TemporaryDirectory() as folder:
        trainer = isoscale.Trainer(recipe, run=Path(folder) / "run")
        run = trainer.fit(task, isoscale.Sources(train=kind.data()))
        decided = run.record["decided"]
        if stop:
            recipe["train"]["steps"] = count
            again = network(kind)
            model.load_state_dict(again.state_dict())
            run = isoscale.Trainer(recipe, run=Path(folder) / "run").fit(task, isoscale.Sources(train=kind.data()))
        clock = dict(run.history("time/seconds"))
        lines = (Path(folder) / "run" / "log.txt").read_text().splitlines()
        half = [each for each in sorted(clock) if each > count // 2]
        spans = [(clock[b] - clock[a]) / (b - a) for a, b in pairwise(half)]
        steady = min(spans) if spans else 0.0
        return {
            "step": steady,
            "ready": clock[min(clock)] - min(clock) * steady,
            "sha": run.summary()["weights_sha256"][:8],
            "decided": {name: decided[name] for name in ("program", "kernels", "memory_format")},
            "lines": [line.split("  ", 1)[1] for line in lines if "program:" in line or "kernel" in line],
        }


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """In a new process."""
    return begun(function, *arguments)()


def begun(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Begin something in a new process; what is returned waits for it."""
    context = multiprocessing.get_context("fork")
    queue: Any = context.SimpleQueue()

    def run() -> None:
        try:
            queue.put(function(*arguments))
        except BaseException as error:
            queue.put(f"{type(error).__name__}: {str(error)[:300]}")

    process = context.Process(target=run)
    process.start()

    def wait() -> Any:
        found = queue.get()
        process.join()
        return found

    return wait


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(KINDS))
    parser.add_argument("--hashes", action="store_true")
    parser.add_argument("--no-times", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = ["| model | loop by hand, ms | graph by hand, ms | isoscale, ms | isoscale / graph | ready in, s | as |"]
    lines.append("|---|---|---|---|---|---|---|")
    for name, kind in KINDS.items():
        if options.no_times or not any(each in name for each in options.names):
            continue
        loop, graph = apart(by_hand, kind, False), apart(by_hand, kind, True)
        ours = apart(by_isoscale, kind)
        if isinstance(loop, str) or isinstance(graph, str) or isinstance(ours, str):
            lines.append(f"| {name} | {loop} | {graph} | {ours} | | | |")
        else:
            as_decided = ", ".join(ours["decided"].values())
            lines.append(
                f"| {name} | {1e3 * loop[0]:.3f} | {1e3 * graph[0]:.3f} | {1e3 * ours['step']:.3f} | "
                f"{ours['step'] / graph[0]:.2f} | {ours['ready']:.2f} | {as_decided} |"
            )
            for line in ours["lines"]:
                print("   ", line, file=sys.stderr)
        print(lines[-1], flush=True)
    if options.hashes:
        lines += ["", "| model | hashes of ten processes | stopped and continued |", "|---|---|---|"]
        for name, kind in KINDS.items():
            if any(each in name for each in options.names):
                waits = [begun(by_isoscale, kind, 40) for _ in range(10)] + [begun(by_isoscale, kind, 40, 23)]
                *found, again = [wait() for wait in waits]
                hashes = sorted({each if isinstance(each, str) else each["sha"] for each in found})
                lines.append(f"| {name} | {', '.join(hashes)} | {again if isinstance(again, str) else again['sha']} |")
                print(lines[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
