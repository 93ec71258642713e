"""Convolutions as matrix products are torch's convolutions, to rounding, in every pass."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from isoscale.engine.step import convolutions
from isoscale.engine.step import slow_convolutions as timing
from isoscale.engine.step.convolutions import (
    Correlate,
    Gather,
    Geometry,
    Spread,
    as_products,
    blocks,
    convolution,
    is_eligible,
    transposed_convolution,
)
from isoscale.engine.step.slow_convolutions import Call, Times, measure, record_calls, slow_convolutions
from isoscale.errors import UserError

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PLAIN = (functional.conv1d, functional.conv2d, functional.conv3d)
PLAIN_TRANSPOSED = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Case(NamedTuple):
    is_transposed: bool
    num_samples: int
    channels: tuple[int, int]
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    has_bias: bool

    def tensors(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
        """Input, weight and bias of small whole numbers, whose sums of products float32 holds exactly."""
        generator = torch.Generator().manual_seed(0)
        given, found = self.channels
        shapes = [(self.num_samples, given, *self.size), (*self._order(given, found), *self.kernel)]
        shapes += [(found,)] * self.has_bias
        return [torch.randint(-3, 4, each, generator=generator).to(device, dtype).requires_grad_() for each in shapes]

    def _order(self, given: int, found: int) -> tuple[int, int]:
        return (given, found) if self.is_transposed else (found, given)

    def plain(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.is_transposed:
            compute = PLAIN_TRANSPOSED[len(self.size) - 1]
            return compute(input, weight, bias, self.stride, self.padding, self.output_padding, 1, self.dilation)
        return PLAIN[len(self.size) - 1](input, weight, bias, self.stride, self.padding, self.dilation)

    def products(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        arguments = self.stride, self.padding, self.dilation
        if self.is_transposed:
            arguments = self.stride, self.padding, self.output_padding, self.dilation
        compute = transposed_convolution if self.is_transposed else convolution
        return compute(input, weight, bias, *arguments)

    @property
    def is_possible(self) -> bool:
        sizes = zip(self.size, self.kernel, self.stride, self.padding, self.dilation, self.output_padding, strict=True)
        if self.is_transposed:
            return all((n - 1) * s - 2 * p + d * (k - 1) + extra + 1 > 0 for n, k, s, p, d, extra in sizes)
        return all(n + 2 * p - d * (k - 1) > 0 for n, k, s, p, d, _ in sizes)


@st.composite
def cases(draw: Callable[..., Any]) -> Case:
    num_dims = draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return draw(st.tuples(*[st.integers(low, high)] * num_dims))

    stride, dilation = each(1, 3), each(1, 3)
    extra = tuple(draw(st.integers(0, max(pair) - 1)) for pair in zip(stride, dilation, strict=True))
    channels = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    return Case(
        draw(st.booleans()), draw(st.integers(1, 3)), channels, each(1, 8), each(1, 4), stride, each(0, 3), dilation,
        extra, draw(st.booleans()),
    )  # fmt: skip


def all_of(compute: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of a weighted sum of it."""
    output = compute(*tensors)
    weights = torch.randint(-3, 4, output.shape, generator=torch.Generator().manual_seed(1))
    return [output.detach(), *torch.autograd.grad(output, tensors, weights.to(output.device, output.dtype))]


def doubled(tensors: list[Tensor]) -> list[Tensor]:
    return [each.detach().double().requires_grad_() for each in tensors]


def assert_close(found: list[Tensor], expected: list[Tensor], tolerance: float = 0.0) -> None:
    """Differences are small beside the largest number of a tensor, or none."""
    assert [each.shape for each in found] == [each.shape for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other.double()).abs().max() <= tolerance * other.abs().max()


UP = Case(True, 2, (3, 4), (3, 4, 2), (4, 4, 4), (2, 2, 2), (1, 1, 1), (1, 1, 1), (0, 0, 0), True)
DOWN = Case(False, 2, (4, 3), (6, 8, 4), (4, 4, 4), (2, 2, 2), (1, 1, 1), (1, 1, 1), (0, 0, 0), True)
ODD = Case(False, 1, (1, 1), (7, 5), (3, 2), (2, 3), (2, 0), (2, 1), (0, 0), False)
ODD_UP = Case(True, 1, (3, 1), (4, 3), (3, 2), (2, 3), (1, 0), (3, 2), (2, 1), False)


@settings(max_examples=250)
@given(cases().filter(lambda case: case.is_possible), st.sampled_from([2**30, 2000, 100]), st.sampled_from([1, 128]))
def test_every_pass_is_torch_s(case: Case, column_bytes: int, num_tiles: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolutions, "COLUMN_BYTES", column_bytes)
        patch.setattr(convolutions, "NUM_TILES", num_tiles)
        tensors = case.tensors()
        assert "Convolution" not in type(case.products(*tensors).grad_fn).__name__
        assert_close(all_of(case.products, tensors), all_of(case.plain, doubled(tensors)))


@pytest.mark.parametrize("case", [UP, DOWN])
def test_every_pass_is_torch_s_to_rounding(case: Case) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn_like(each).requires_grad_() for each in case.tensors()]
    assert_close(all_of(case.products, tensors), all_of(case.plain, doubled(tensors)), 1e-6)


@pytest.mark.parametrize("case", [UP, DOWN, ODD, ODD_UP])
def test_second_derivatives_are_those_of_finite_differences(case: Case) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn_like(each, dtype=torch.float64).requires_grad_() for each in case.tensors()]
    input, weight, *bias = tensors
    geometry, size = Geometry(case.stride, case.padding, case.dilation), tuple(case.plain(*tensors).shape[2:])
    kind = Spread if case.is_transposed else Gather

    def compute(input: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        return kind.apply(input, weight, *(bias or [None]), geometry, size)

    assert torch.autograd.gradcheck(compute, (input, weight, *bias), fast_mode=True)
    assert torch.autograd.gradgradcheck(compute, (input, weight, *bias), fast_mode=True)
    big, small = (compute(*tensors).detach().requires_grad_(), input)[:: 1 if case.is_transposed else -1]

    def correlate(big: Tensor, small: Tensor) -> Tensor:
        return Correlate.apply(big, small, case.kernel, geometry, False)

    assert torch.autograd.gradgradcheck(correlate, (big, small), fast_mode=True)


@pytest.mark.parametrize("case", [UP, DOWN, ODD, ODD_UP])
@pytest.mark.parametrize("input_last", [False, True])
@pytest.mark.parametrize("weight_last", [False, True])
def test_memory_formats_are_those_of_torch(case: Case, input_last: bool, weight_last: bool) -> None:
    case = case._replace(channels=(5, 3))
    tensors, wanted = case.tensors(), (input_last, weight_last, False)
    tensors = [
        each.detach().contiguous(memory_format=LAST[each.dim()]).requires_grad_() if last else each
        for each, last in zip(tensors, wanted, strict=False)
    ]
    found = all_of(case.products, tensors)
    assert_close(found, all_of(case.plain, doubled(tensors)))
    expected = LAST[2 + len(case.size)] if input_last or weight_last else torch.contiguous_format
    assert found[0].is_contiguous(memory_format=expected)
    assert found[2].stride() == tensors[1].stride()


def test_views_with_gaps_and_steps_are_read_where_they_lie() -> None:
    for case in (UP, DOWN):
        input, weight, bias = case.tensors()
        wide = torch.randint(-3, 4, (4, *(2 * each + 1 for each in input.shape[1:]))).float()
        view = wide[1:3, 1::2, 1::2, : 2 * input.shape[3] : 2, 1::2].detach().requires_grad_()
        assert view.shape == input.shape
        tensors = [view, weight, bias]
        assert_close(all_of(case.products, tensors), all_of(case.plain, doubled(tensors)))
        # a channels-last slice that begins where no wide word does
        last = torch.randint(-3, 4, (3, *input.shape[2:], input.shape[1] + 1)).float()
        tensors = [last[1:, ..., 1:].movedim(-1, 1).requires_grad_(), weight, bias]
        assert_close(all_of(case.products, tensors), all_of(case.plain, doubled(tensors)))


def test_values_that_begin_between_two_words_are_copied_as_they_are() -> None:
    case = Case(False, 2, (4, 3), (9,), (3,), (2,), (0,), (1,), (0,), False)
    input, weight = case.tensors()
    shifted = torch.cat([torch.zeros(1), input.detach().movedim(1, -1).flatten()])[1:].view(2, 9, 4).movedim(-1, 1)
    tensors = [shifted.requires_grad_(), weight]
    assert_close(all_of(case.products, tensors), all_of(case.plain, doubled(tensors)))


@pytest.mark.parametrize("case", [UP, DOWN])
def test_autocast_computes_in_its_dtype_and_gives_gradients_in_that_of_the_weights(case: Case) -> None:
    tensors = case.tensors()
    with torch.autocast("cpu", torch.bfloat16):
        output = case.products(*tensors)
        assert output.dtype == torch.bfloat16 == case.plain(*tensors).dtype
        found = [output.float(), *torch.autograd.grad(output.float().sum(), tensors)]  # inside: it changes nothing
    assert [each.dtype for each in found] == [torch.float32] * 4
    rounded = [each.detach().bfloat16().float().requires_grad_() for each in tensors]
    expected = case.plain(*rounded)
    assert_close(found, [expected, *torch.autograd.grad(expected.sum(), rounded)], 0.01)


def test_a_backward_pass_inside_autocast_keeps_the_dtype_of_the_forward_pass() -> None:
    for case in (UP, DOWN):
        tensors = case.tensors()
        output = case.products(*tensors)
        outside = torch.autograd.grad(output.sum(), tensors, retain_graph=True)
        with torch.autocast("cpu", torch.bfloat16):
            inside = torch.autograd.grad(output.sum(), tensors)
        assert all(torch.equal(one, other) for one, other in zip(inside, outside, strict=True))


def test_many_terms_of_a_weight_gradient_are_added_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "COLUMN_BYTES", 256)
    input, output = (torch.ones(1, 1, 4099, dtype=torch.bfloat16) for _ in range(2))
    geometry = Geometry((1,), (0,), (1,))
    found = Correlate.apply(input, output, (1,), geometry, False)
    assert found.item() == 4096  # 4099 rounded once; adding ones in bfloat16 would end at 256


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_float64_and_complex_numbers_are_left_to_torch(dtype: torch.dtype) -> None:
    for case in (UP, DOWN):
        tensors = [each.detach().to(dtype) for each in case.tensors()]
        assert torch.equal(case.products(*tensors), case.plain(*tensors))


def test_what_torch_refuses_is_refused_in_its_words() -> None:
    for case in (UP, DOWN):
        input, weight, bias = case.tensors()
        wrong = [(input[:, :2], weight, bias), (input, weight.bfloat16(), bias), (input[..., 0], weight[..., :1], bias)]
        if not case.is_transposed:
            wrong += [(input[..., :1], weight, bias)]
        for arguments in wrong:
            with pytest.raises(RuntimeError) as own:
                case.plain(*arguments)
            with pytest.raises(RuntimeError) as found:
                case.products(*arguments)
            assert str(found.value) == str(own.value)


def test_one_sample_without_a_batch_and_batches_under_vmap() -> None:
    for case in (UP, DOWN):
        input, weight, bias = (each.detach() for each in case.tensors())
        assert_close([case.products(input[0], weight, bias)], [case.plain(input[0], weight, bias)])
        several = torch.func.vmap(case.products, (0, None, None))(input, weight, bias)
        assert_close([several], [case.plain(input, weight, bias)])


@given(st.integers(1, 70), st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 2**26))
def test_blocks_cover_every_position_once_within_the_bound(num: int, size: list[int], each: int) -> None:
    seen = torch.zeros(num, size[0], dtype=torch.int64)
    for samples, first in blocks(num, tuple(size), each):
        seen[samples, first] += 1
        num_rows = len(range(num)[samples]) * len(range(size[0])[first])
        assert num_rows == 1 or num_rows * math.prod(size[1:]) * each <= convolutions.COLUMN_BYTES
    assert (seen == 1).all()


class Net(nn.Module):
    """A small U-Net, with what products do not compute beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_passes", torch.zeros(()))
        self.down = nn.Conv3d(2, 4, 4, 2, 1)
        self.norm = nn.BatchNorm3d(4)
        self.drop = nn.Dropout(0.5)
        self.same = nn.Conv3d(4, 4, 3, padding="same")
        self.groups = nn.Conv3d(4, 4, 3, padding=1, groups=2)
        self.circular = nn.Conv3d(4, 4, 3, padding=1, padding_mode="circular")
        self.up = nn.ConvTranspose3d(4, 2, 3, 2, 1)

    def forward(self, input: Tensor) -> Tensor:
        self.num_passes = self.num_passes + 1
        hidden = self.drop(self.norm(self.down(input)).relu())
        return self.up(self.circular(self.groups(self.same(hidden))), output_size=input.shape[2:])


def net_and_input() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(2, 2, 6, 8, 6)


def test_named_modules_compute_with_products_until_it_is_taken_back() -> None:
    net, input = net_and_input()
    net.eval()
    names, before, attributes = list(net.state_dict()), net(input), set(net.up.__dict__)
    undo = as_products(net, ["down", "up"])
    during = net(input)
    assert type(during.grad_fn).__name__ == "SpreadBackward"
    assert_close([during.detach()], [before.detach()], 1e-6)
    assert list(net.state_dict()) == names
    assert [name for name, module in net.named_modules() if is_eligible(module)] == []
    undo()
    after = net(input)
    assert type(after.grad_fn).__name__ != "SpreadBackward"
    assert torch.equal(after, before)
    assert set(net.up.__dict__) == attributes


def test_a_copy_computes_with_its_own_weights_and_a_pickle_with_torch() -> None:
    net, input = net_and_input()
    net.eval()
    as_products(net, ["down", "up"])
    twin, loaded = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
    with torch.no_grad():
        net.up.weight.zero_()
        net.up.bias.zero_()
    assert net(input).abs().max() == 0
    assert twin(input).abs().max() > 0
    assert type(twin(input).grad_fn).__name__ == "SpreadBackward"
    assert type(loaded(input).grad_fn).__name__ != "SpreadBackward"
    assert is_eligible(loaded.up)


@pytest.mark.full
def test_a_compiled_network_is_one_graph_with_the_same_gradients() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(3, 2, 4, 2, 1))
    as_products(net, ["0", "2"])
    inputs = torch.randn(2, 2, 6, 6)
    expected = torch.autograd.grad(net(inputs).square().sum(), list(net.parameters()))
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(inputs).square().sum(), list(net.parameters()))
    assert_close(list(found), list(expected), 1e-6)


def test_only_zero_padding_in_numbers_without_groups_is_eligible() -> None:
    net, _ = net_and_input()

    class Own(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).relu()

    net.own = Own(1, 1, 3)
    net.weighted = nn.utils.parametrizations.weight_norm(nn.Conv1d(1, 1, 3))
    eligible = [name for name, module in net.named_modules() if is_eligible(module)]
    assert eligible == ["down", "up", "weighted"]
    for name in ("own", "groups", "missing"):
        with pytest.raises(UserError, match=name):
            as_products(net, ["down", name])
    assert is_eligible(net.down)


def test_noting_the_calls_leaves_no_trace() -> None:
    net, input = net_and_input()
    grads = {name: torch.ones_like(each) for name, each in net.named_parameters()}
    for name, each in net.named_parameters():
        each.grad = grads[name]
    before, generator = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    buffers = dict(net.named_buffers())

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            net(input.contiguous(memory_format=torch.channels_last_3d))

    calls = record_calls(net, run)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(buffer is buffers[name] for name, buffer in net.named_buffers())
    assert all(each.grad is grads[name] for name, each in net.named_parameters())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in net.modules())
    assert list(calls) == ["down", "up"]
    down, up = calls.values()
    assert (down.dtype, down.input_shape, down.input_last, down.by_input) == (torch.bfloat16, input.shape, True, False)
    assert (up.is_transposed, up.by_input, up.geometry) == (True, True, Geometry((2,) * 3, (1,) * 3, (1,) * 3))
    assert down.flop == 2 * 2 * (3 * 4 * 3) * 4 * (2 * 64)
    assert up.flop == 2 * 2 * (3 * 4 * 3) * 4 * (2 * 27)


def test_noting_the_calls_leaves_no_trace_of_a_pass_that_fails() -> None:
    net, input = net_and_input()
    before = copy.deepcopy(net.state_dict())

    def run() -> None:
        net(input)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record_calls(net, run)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_slow_are_those_that_gain_half_and_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Conv1d(1, 8, 3), nn.Conv1d(8, 8, 3), nn.Conv1d(8, 8, 3), nn.Conv1d(8, 2, 3))
    times = {1: Times(9.0, 1.0), 8: Times(3.0, 2.0), 2: Times(2.9, 2.0)}
    asked: list[Call] = []

    def time_call(call: Call) -> Times | None:
        asked.append(call)
        return times[call.weight_shape[0] if call.weight_shape[1] == 8 else 1]

    monkeypatch.setattr(timing, "time_call", time_call)
    monkeypatch.setattr(timing, "MIN_FLOP", 5_000)
    run = lambda: net(torch.randn(1, 1, 50))  # noqa: E731
    assert slow_convolutions(net, run) == ["1", "2"]  # the first is too small, the last gains too little
    assert [call.flop for call in asked] == sorted((call.flop for call in asked), reverse=True)
    assert measure(net, run, max_seconds=0.0) == {}


@needs_cuda
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("case", [UP, DOWN, ODD, ODD_UP])
def test_bfloat16_on_a_gpu_is_near_to_torch(case: Case, last: bool) -> None:
    case = case._replace(channels=(24, 40), num_samples=3)
    tensors = case.tensors(torch.bfloat16, "cuda")
    if last:
        formats = [LAST.get(each.dim(), torch.contiguous_format) for each in tensors]
        tensors = [
            each.detach().contiguous(memory_format=form).requires_grad_()
            for each, form in zip(tensors, formats, strict=True)
        ]
    assert_close(all_of(case.products, tensors), all_of(case.plain, doubled(tensors)), 0.01)
    first, second = all_of(case.products, tensors), all_of(case.products, tensors)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@needs_cuda
@pytest.mark.parametrize("column_bytes", [2**30, 2**14])
def test_a_captured_pass_has_the_bits_of_an_eager_one(column_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "COLUMN_BYTES", column_bytes)
    net = nn.Sequential(nn.Conv3d(4, 64, 4, 2, 1), nn.ReLU(), nn.ConvTranspose3d(64, 8, 4, 2, 1)).cuda()
    net.to(memory_format=torch.channels_last_3d)
    as_products(net, ["0", "2"])
    input = torch.randn(4, 4, 16, 16, 16, device="cuda").contiguous(memory_format=torch.channels_last_3d)

    def step() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            output = net(input)
        return [output, *torch.autograd.grad(output.float().square().mean(), list(net.parameters()))]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            eager = [each.detach().clone() for each in step()]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(captured, eager, strict=True))


@needs_cuda
def test_slow_convolutions_are_found_without_a_trace() -> None:
    net = nn.Sequential(nn.Conv3d(4, 64, 4, 2, 1), nn.BatchNorm3d(64), nn.Dropout(), nn.Conv3d(64, 128, 4, 2, 1)).cuda()
    net.to(memory_format=torch.channels_last_3d)
    input = torch.randn(8, 4, 32, 32, 32, device="cuda").contiguous(memory_format=torch.channels_last_3d)
    before, generator = copy.deepcopy(net.state_dict()), torch.cuda.get_rng_state()

    def run() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            net(input)

    times = measure(net, run)
    used = torch.cuda.memory_allocated()  # with the workspaces of cuBLAS, which stay
    measure(net, run)
    assert torch.cuda.memory_allocated() == used
    assert list(times) == ["0", "3"]
    assert all(min(each) > 0 for each in times.values())
    assert torch.equal(torch.cuda.get_rng_state(), generator)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(each.grad is None for each in net.parameters())
