"""Dropout drops as torch's does, with a mask that belongs to the sample and the step."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from isoscale.data import rng
from isoscale.data.rng import KeyedDropout, StepRandom, key_dropout


def run(module: nn.Module, input: Tensor, samples: list[int] | None = None, step: int = 0, seed: int = 0) -> Tensor:
    """What a module gives for a part of a step."""
    random = StepRandom(seed)
    random.step = step
    random.samples = torch.arange(len(input)) if samples is None else torch.tensor(samples)
    with rng.use(random):
        return module(input)


class Shared(nn.Module):
    """One dropout in two places, each called once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dropout(0.5)
        self.second = self.first

    def forward(self, input: Tensor) -> Tensor:
        return torch.stack([self.first(input), self.second(input)], dim=1)


class Subclass(nn.Dropout):
    """A dropout of the user's own, which may do anything."""


def test_the_mask_never_changes():
    kept = run(KeyedDropout(0.5, "model.1"), torch.ones(2, 8), samples=[4, 9], seed=1)
    assert kept.tolist() == [[2, 0, 2, 2, 0, 0, 0, 2], [0, 0, 2, 2, 0, 0, 2, 0]]


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_share_of_p_is_dropped_and_the_rest_scaled_up(p):
    kept = run(KeyedDropout(p, "drop"), torch.ones(500, 400, dtype=torch.float64))
    rate = (kept == 0).double().mean().item()
    assert abs(rate - p) < 5 * math.sqrt(p * (1 - p) / kept.numel())
    torch.testing.assert_close(kept[kept != 0].unique(), torch.tensor([1 / (1 - p)], dtype=torch.float64))


def test_gradients_pass_where_values_do():
    input = torch.ones(20, 30, requires_grad=True)
    output = run(KeyedDropout(0.4, "drop"), input)
    output.sum().backward()
    assert torch.equal(input.grad, output.detach())


def test_evaluation_and_p_of_zero_change_nothing():
    input = torch.randn(4, 5)
    assert run(KeyedDropout(0.5, "drop").eval(), input) is input
    assert run(KeyedDropout(0.0, "drop"), input) is input


def test_p_of_one_drops_everything():
    assert torch.equal(run(KeyedDropout(1.0, "drop"), torch.ones(50, 60)), torch.zeros(50, 60))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_the_dtype_stays_and_the_decisions_do_not_depend_on_it(dtype):
    module = KeyedDropout(0.5, "drop")
    kept = run(module, torch.ones(8, 9, dtype=dtype))
    assert kept.dtype == dtype
    assert torch.equal(kept.float(), run(module, torch.ones(8, 9)))


def test_rows_do_not_depend_on_the_batch_they_are_in():
    module, input = KeyedDropout(0.5, "drop"), torch.randn(6, 40)
    samples = [50, 17, 3, 99, 20, 4]
    whole = run(module, input, samples)
    assert torch.equal(run(module, input[1:3], samples[1:3]), whole[1:3])
    shuffled = torch.tensor([5, 1, 0, 4, 2, 3])
    again = run(module, input[shuffled], [samples[place] for place in shuffled.tolist()])
    assert torch.equal(again, whole[shuffled])


def test_masks_change_with_step_seed_sample_and_module():
    ones = torch.ones(1, 1000)
    base = run(KeyedDropout(0.5, "a"), ones, [1])
    others = [
        run(KeyedDropout(0.5, "a"), ones, [1], step=1),
        run(KeyedDropout(0.5, "a"), ones, [1], seed=1),
        run(KeyedDropout(0.5, "a"), ones, [2]),
        run(KeyedDropout(0.5, "b"), ones, [1]),
    ]
    for other in others:
        assert 400 < (base != other).sum() < 600


@pytest.mark.parametrize(
    ("torchs", "shape", "num_deciding"),
    [
        (nn.Dropout(0.5), (64, 8, 3, 3), 4),
        (nn.Dropout1d(0.5), (64, 30, 7), 2),
        (nn.Dropout1d(0.5), (64, 7), 1),
        (nn.Dropout2d(0.5), (64, 30, 5, 6), 2),
        (nn.Dropout2d(0.5), (64, 30, 7), 2),
        (nn.Dropout2d(0.5), (64, 30), 2),
        (nn.Dropout3d(0.5), (64, 30, 2, 3, 4), 2),
        (nn.Dropout3d(0.5), (64, 2, 3, 4), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
@pytest.mark.filterwarnings("ignore:dropout")
def test_decisions_are_shared_over_the_dimensions_that_torch_shares_them_over(torchs, shape, num_deciding):
    model = nn.Sequential(torchs)
    key_dropout(model)
    for kept in (run(model, torch.ones(shape)), torchs(torch.ones(shape)), model(torch.ones(shape))):
        assert kept.shape == shape
        decisions = kept.flatten(num_deciding) if num_deciding < kept.dim() else kept[..., None]
        assert torch.equal(decisions, decisions[..., :1].expand_as(decisions))
        decided = decisions[..., 0].flatten() if num_deciding > 1 else decisions[:, 0]
        assert 0.25 < (decided == 0).double().mean() < 0.75
        assert num_deciding == 1 or not torch.equal(kept[:, :1].expand_as(kept), kept)


def test_outside_of_a_step_torchs_generator_draws():
    torch.manual_seed(0)
    module, ones = KeyedDropout(0.5, "drop"), torch.ones(10, 100)
    first, second = module(ones), module(ones)
    assert not torch.equal(first, second)
    assert 0.4 < (first == 0).double().mean() < 0.6


@pytest.mark.parametrize("shape", [(7, 4), (1, 4), (5,), ()])
def test_a_tensor_whose_first_dimension_is_not_the_batch_is_refused_with_its_shape(shape):
    random = StepRandom(0)
    random.samples = torch.arange(4)
    with rng.use(random), pytest.raises(ValueError, match="first dimension is the batch") as caught:
        KeyedDropout(0.5, "model.drop")(torch.ones(shape))
    assert "'model.drop'" in str(caught.value) and str(shape) in str(caught.value) and "4 samples" in str(caught.value)


def test_every_dropout_at_any_depth_is_swapped_and_keeps_its_rate_and_its_mode():
    model = nn.Sequential(
        nn.Linear(3, 3),
        nn.Dropout(0.1),
        nn.ModuleDict({"inner": nn.Sequential(nn.Dropout2d(0.2), nn.Dropout3d(0.3).eval(), nn.Dropout1d(0.4))}),
    )
    assert key_dropout(model) == []
    swapped = {name: child for name, child in model.named_modules() if isinstance(child, KeyedDropout)}
    found = {name: (child.p, child.num_spatial, child.training, child.purpose) for name, child in swapped.items()}
    assert found == {
        "1": (0.1, 0, True, "1"),
        "2.inner.0": (0.2, 2, True, "2.inner.0"),
        "2.inner.1": (0.3, 3, False, "2.inner.1"),
        "2.inner.2": (0.4, 1, True, "2.inner.2"),
    }
    assert all(child.training for child in model.train().modules())
    assert not any(child.training for child in model.eval().modules())


def test_swapping_leaves_the_names_of_weights_and_what_evaluation_gives_alone():
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    before, input = copy.deepcopy(model), torch.randn(3, 4, 8)
    key_dropout(model)
    assert list(model.state_dict()) == list(before.state_dict())
    model.load_state_dict(before.state_dict())
    torch.testing.assert_close(model.eval()(input), before.eval()(input))


def test_swapping_twice_changes_nothing_more():
    model = nn.Sequential(nn.Dropout(0.5))
    key_dropout(model)
    first = model[0]
    assert key_dropout(model) == [] and model[0] is first


def test_what_draws_on_torchs_generator_and_cannot_be_swapped_is_named():
    shared = nn.AlphaDropout(0.1)
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(4, 2, dropout=0.1),
            "plain_attention": nn.MultiheadAttention(4, 2),
            "lstm": nn.LSTM(2, 2, num_layers=2, dropout=0.3),
            "plain_lstm": nn.LSTM(2, 2),
            "alpha": shared,
            "again": shared,
            "plain_alpha": nn.AlphaDropout(0.0),
            "features": nn.FeatureAlphaDropout(0.1),
            "rrelu": nn.RReLU(),
            "own": Subclass(0.2),
            "dropout": nn.Dropout(0.2),
        }
    )
    assert key_dropout(model) == [
        "attention (MultiheadAttention)",
        "lstm (LSTM)",
        "alpha (AlphaDropout)",
        "features (FeatureAlphaDropout)",
        "rrelu (RReLU)",
        "own (Subclass)",
    ]


def test_a_task_that_is_itself_a_dropout_is_named():
    assert key_dropout(nn.Dropout(0.5)) == ["the task itself (Dropout)"]


def test_a_dropout_in_two_places_is_keyed_in_both_and_stays_one_module():
    model = Shared()
    assert key_dropout(model) == []
    assert isinstance(model.first, KeyedDropout) and model.second is model.first


@pytest.mark.parametrize("step", [0, 5])
def test_a_dropout_that_is_called_again_in_a_step_draws_a_new_mask(step):
    model = Shared()
    key_dropout(model)
    masks = run(model, torch.ones(50, 200), step=step)
    both = (masks[:, 0] == masks[:, 1]).double().mean()
    assert 0.45 < both < 0.55
    assert torch.equal(run(model, torch.ones(50, 200), step=step), masks)


def test_the_masks_of_a_dropout_that_is_called_again_do_not_depend_on_how_the_batch_is_cut():
    model, input = Shared(), torch.ones(6, 50)
    key_dropout(model)
    whole, random, rows = run(model, input), StepRandom(0), []
    with rng.use(random):
        for part in torch.arange(6).split(2):
            random.samples = part
            rows.append(model(input[part]))
    assert torch.equal(torch.cat(rows), whole)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_dropout_drops_in_the_backward_pass_what_it_dropped_in_the_forward(use_reentrant):
    model = nn.Sequential(nn.Dropout(0.5), nn.Tanh())
    key_dropout(model)
    plain, saved = (torch.full((20, 30), 0.3, requires_grad=True) for _ in range(2))
    random = StepRandom(0)
    with rng.use(random):
        random.samples = torch.arange(20)
        model(plain).sum().backward()
        random.samples = torch.arange(20)
        checkpoint(model, saved, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(saved.grad, plain.grad)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_dropout_that_is_called_again_is_refused(use_reentrant):
    model = Shared()
    key_dropout(model)
    random = StepRandom(0)
    random.samples = torch.arange(4)
    with rng.use(random):
        output = checkpoint(model, torch.ones(4, 5, requires_grad=True), use_reentrant=use_reentrant)
        with pytest.raises(ValueError, match="give every use a dropout module of its own"):
            output.square().sum().backward()


def test_a_dropout_that_works_in_place_still_does():
    model, input = nn.Sequential(nn.Dropout(0.5, inplace=True)), torch.ones(10, 20)
    key_dropout(model)
    assert run(model, input) is input
    assert (input == 0).any()
