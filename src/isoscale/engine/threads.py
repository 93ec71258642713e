"""CPU threads: whether several pay for a step, by the size of its operations; never by timing, which differs."""

import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from isoscale.data.batches import tensors_of
from isoscale.data.generators import kept_generators
from isoscale.engine.assembly import Assembly
from isoscale.engine.figures import NUM_LOOKED_AT, look, samples_of
from isoscale.engine.settings import Decisions
from isoscale.parallel.collectives import Ranks

WORTH_THREADS = 10e6
"""Floating point operations that a typical operation of a step must have: two threads are then 1.3 to 1.8 times as fast
as one on idle cores. With fewer they are 0.3 to 1.25 times as fast, and beside a busy program 0.04 to 0.4 times
(benchmarks/results/2026-11-18-threads.md)."""
PER_NUMBER = 16
"""What touching one number costs in floating point operations of a matrix product."""
PER_NUMBER_OF_FFT = 64


def settle_threads(decided: Decisions, parts: Assembly, ranks: Ranks) -> None:
    """Decide between one thread and all cores, where nobody has; the first rank does it for all."""
    if not decided.threads:
        work = ranks.broadcast(typical_work(parts) if ranks.is_main else 0.0, "the size of a step")
        size = f"operations of about {max(0.01, work / 1e6):{',.0f' if work >= WORTH_THREADS else '.2g'}} MFLOP"
        if work < WORTH_THREADS:
            decided.threads, decided.threads_why = 1, f"{size} are too small for more"
        else:
            decided.threads, decided.threads_why = decided.cores, f"{size} are worth all cores"
    torch.set_num_threads(decided.threads)


def typical_work(parts: Assembly) -> float:
    """Floating point operations of a typical operation, such as a matrix product, in a step of a whole batch.

    Threads wait for each other after every operation: a hundred small ones gain no more by them than one. They are
    counted while the task predicts for a few samples, and where it cannot, estimated from its layers.
    """
    counting = Counting()
    with kept_generators():
        look(parts, beside=counting)
    works = counting.works
    if not any(works):
        with kept_generators(), suppress(Exception):  # samples that cannot be read are named when they are trained on
            works = [NUM_LOOKED_AT * work for work in _of_layers(parts)]
    return typical(works) * parts.train.plan.batch_size / NUM_LOOKED_AT


def typical(works: list[float]) -> float:
    """The mean over all that is computed of the size of the operation that it belongs to."""
    return sum(work * work for work in works) / max(1.0, sum(works))


class Counting(TorchDispatchMode):
    """Counts the floating point operations of tensor operations, one by one."""

    def __init__(self) -> None:
        """Nothing is counted yet."""
        from torch.utils.flop_counter import flop_registry  # takes a while to import

        super().__init__()
        self.works: list[float] = []
        self._formulas: dict[Any, Any] = flop_registry

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do it, and count it."""
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        packet = getattr(function, "_overloadpacket", None)
        found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        times = 4 if any(tensor.is_complex() for tensor in found) else 1
        if packet in self._formulas:
            with suppress(Exception):  # of a kernel with other arguments than the formula knows
                self.works.append(times * float(self._formulas[packet](*args, **kwargs, out_val=result)))
        elif packet is torch.ops.aten.mkldnn_rnn_layer:  # an LSTM: all its time steps, which follow each other
            steps, rows, *_ = args[0].shape
            self.works += [2.0 * rows * (args[1].numel() + args[2].numel())] * steps
        elif not getattr(function, "is_view", False):
            cost = PER_NUMBER_OF_FFT if "fft" in str(packet) else PER_NUMBER
            self.works.append(float(cost * sum(tensor.numel() for tensor in found)))
        return result


def _of_layers(parts: Assembly) -> Iterator[float]:
    """Floating point operations per sample and layer, as far as shapes of weights and of a sample tell."""
    tensors = tensors_of(samples_of(parts, 1))
    largest = max(tensors, key=Tensor.numel, default=torch.empty(1))
    has_words = any(isinstance(module, nn.Embedding) for module in parts.task.modules())
    words = max((tensor.numel() for tensor in tensors if not tensor.is_floating_point()), default=1) if has_words else 1
    for module in parts.task.modules():
        weights = [each for each in module.parameters(recurse=False) if not is_lazy(each) and each.dim() > 1]
        for weight in weights if not isinstance(module, nn.Embedding) else ():
            places = max(words, largest.numel() // max(1, weight.shape[-1]))
            if isinstance(module, nn.modules.conv._ConvNd):
                places = math.prod(largest.shape[-len(module.kernel_size) :])
            elif isinstance(module, nn.RNNBase):
                places = 1  # one time step after the other
            yield 2.0 * weight.numel() * places
