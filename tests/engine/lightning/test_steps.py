"""What people do inside and around a training step: weights, counters and hooks of Lightning, also over a restart."""

from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isoscale
from isoscale.engine.state.checkpoint import read
from isoscale.errors import Stopped, UserError
from tests.engine.lightning import modules
from tests.engine.lightning.modules import Classifier, Points
from tests.engine.lightning.test_habits import stopping
from tests.engine.lightning.test_lightning import assert_same_weights, both, fit, fit_lightning, lines, pair
from tests.engine.step.recorded_graphs import recorded_graphs
from tests.helpers import newest_step, sha
from tests.ranks import fit_on

__all__ = ["recorded_graphs"]


class Bare(Classifier):
    """Without metrics that nobody can capture."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class Told(Bare):
    """Writes down what is called, and how far training is."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def tell(self, name: str, *values: Any) -> None:
        if not self.trainer.sanity_checking:
            self.calls.append((name, self.global_step, *values))


class OwnBackward(Told):
    """Gradient surgery in `backward`: the graph is used twice, and gradients are changed."""

    def backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        self.tell("backward", round(float(loss.detach()), 5))
        loss.backward(*arguments, retain_graph=True, **options)
        (0.5 * loss).backward()
        self.net[0].bias.grad.mul_(0.5)

    def on_before_backward(self, loss: Tensor) -> None:
        self.tell("on_before_backward")

    def on_after_backward(self) -> None:
        self.tell("on_after_backward", round(float(self.net[0].bias.grad.norm()), 5))


class CapturedBackward(Bare):
    def backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        loss.backward(*arguments, retain_graph=True, **options)
        (0.5 * loss).backward()
        self.net[0].bias.grad.mul_(0.5)


class OwnZeroGrad(Told):
    """Gradients that are added up over two batches, as people did before there was an option for it."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        self.tell("optimizer_zero_grad", epoch, batch_idx, self.net[0].bias.grad is None)
        if batch_idx % 2 == 0:
            optimizer.zero_grad(set_to_none=False)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.tell("on_before_zero_grad", type(optimizer).__name__)

    def on_validation_model_zero_grad(self) -> None:
        """Keep them."""


class OwnOptimizerStep(Told):
    """Looks at the gradients between the closure and the update, and leaves out every third update."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        self.tell("optimizer_step", epoch, batch_idx, isinstance(optimizer, torch.optim.Adam))
        if batch_idx % 3 == 2:
            loss = optimizer_closure()
            self.tell("not updated", round(float(loss), 5))
        else:
            optimizer.step(closure=optimizer_closure)
        self.tell("updated", round(float(self.net[0].bias.grad.norm()), 5))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.tell("on_before_optimizer_step", hasattr(optimizer, "toggle_model"))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tell("on_train_batch_end", sorted(outputs), batch_idx)


class QuasiNewton(Told):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.tell("training_step", batch_idx)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4, history_size=3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class StrongWolfe(QuasiNewton):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3, line_search_fn="strong_wolfe")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.tell("on_before_optimizer_step")


class Sharpness(torch.optim.SGD):
    """A gradient where the loss is highest nearby, as SAM has it: two evaluations in a step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "a closure is needed"
        closure = torch.enable_grad()(closure)
        loss = closure()
        parameters = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        moves = [0.05 * each.grad / (each.grad.norm() + 1e-12) for each in parameters]
        torch._foreach_add_(parameters, moves)
        closure()
        torch._foreach_sub_(parameters, moves)
        super().step()
        return loss


class SharpnessAware(Told):
    def configure_optimizers(self) -> Any:
        return Sharpness(self.parameters(), lr=0.1, momentum=0.9)


class Skipping(Told):
    """Leaves some batches out, by what their loss is."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.tell("training_step", batch_idx)
        return None if batch_idx % 3 == 1 else {"loss": loss, "seen": batch_idx}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tell("on_train_batch_end", sorted(outputs), batch_idx)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.tell("on_before_optimizer_step", self.net[0].bias.grad is None)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class SkippingWithHooks(Skipping):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.tell("on_before_zero_grad", self.net[0].bias.grad is None)

    def on_after_backward(self) -> None:
        self.tell("on_after_backward")


IN_A_STEP = [
    OwnBackward, OwnZeroGrad, OwnOptimizerStep, QuasiNewton, StrongWolfe, SharpnessAware, Skipping, SkippingWithHooks
]  # fmt: skip


@pytest.mark.parametrize("make", IN_A_STEP)
def test_a_step_has_the_weights_hooks_and_counters_of_lightning(make: Any, tmp_path: Path) -> None:
    ours, theirs, *_ = both(make, tmp_path, epochs=2)
    assert_same_weights(ours, theirs)
    assert ours.calls == theirs.calls


@pytest.mark.slow
@pytest.mark.parametrize("make", IN_A_STEP)
def test_a_step_does_not_notice_a_stop(make: Any, tmp_path: Path) -> None:
    straight, stopped = pair(make)
    again = deepcopy(stopped)
    fit(straight, Points(shuffle=True), tmp_path / "straight", 2)
    with pytest.raises(Stopped):
        fit(stopping(stopped, 11), Points(shuffle=True), tmp_path / "stopped", 2)
    assert 0 < newest_step(tmp_path / "stopped") < 12
    fit(again, Points(shuffle=True), tmp_path / "stopped", 2)
    assert_same_weights(straight, again)
    assert again.calls == straight.calls
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight")


def test_clipping_by_the_recipe_reaches_every_evaluation_of_a_closure(tmp_path: Path) -> None:
    ours, theirs, *_ = both(QuasiNewton, tmp_path, gradient_clip_val=0.1, overrides={"train.clip": 0.1}, epochs=1)
    assert_same_weights(ours, theirs)
    assert "LBFGS computes the loss up to 5 times in a step" in (tmp_path / "run" / "log.txt").read_text()


REASONS = {
    CapturedBackward: "", OwnZeroGrad: "hook optimizer_zero_grad runs on the host",
    QuasiNewton: "LBFGS evaluates the loss several times in one step", SharpnessAware: "Sharpness evaluates the loss",
    Skipping: "returns None for some batches",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("recorded_graphs")
@pytest.mark.parametrize("make", REASONS)
def test_what_a_step_does_is_captured_or_refused_with_a_line(make: Any, tmp_path: Path) -> None:
    runs = {}
    for program in ("eager", "auto"):
        torch.manual_seed(1)
        runs[program] = fit(make(), Points(), tmp_path / program, 3, **{"train.program": program})
    decided = runs["auto"].record["decided"]
    assert decided["program"] == ("eager" if REASONS[make] else "graphed"), decided["why"]
    assert REASONS[make] in decided["why"]
    assert sha(runs["auto"]) == sha(runs["eager"])


class SkippingByShape(Bare):
    """Leaves out what is no full batch, which the first steps do not show."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) if len(batch[0]) == 8 else None


@pytest.mark.usefixtures("recorded_graphs")
def test_a_step_that_is_skipped_after_the_capture_is_still_skipped(tmp_path: Path) -> None:
    ours, theirs = pair(SkippingByShape)
    run = fit(ours, Points(), tmp_path / "run", 4, **{"train.program": "auto"})
    fit_lightning(theirs, Points(), 4)
    assert "returns None for some batches" in run.record["decided"]["why"]
    assert_same_weights(ours, theirs, 1e-5, 1e-6)  # captured updates take their numbers from tensors


def test_a_skipped_step_is_said_and_logs_nothing_of_a_loss(tmp_path: Path) -> None:
    run = fit(Skipping(), Points(), tmp_path / "run", 1)
    assert (tmp_path / "run" / "log.txt").read_text().count("training_step returned None at step 2") == 1
    assert [step for step, _ in run.history("train/loss")] == [1, 3, 4, 6, 7]


def test_a_training_that_never_returns_a_loss_is_refused_in_the_end(tmp_path: Path) -> None:
    module = type("Module", (Classifier,), {"training_step": lambda self, batch, batch_idx: None})()
    with pytest.raises(UserError, match=r"None in all 8 steps, .* does it return its loss"):
        fit(module, Points(), tmp_path / "run", 1)


def test_a_skipped_part_of_a_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"training_step returned None, .* computed in parts"):
        fit(SkippingByShape(), Points(), tmp_path / "run", 1, **{"train.accumulate": 2})


def test_an_optimizer_step_that_forgets_its_closure_is_refused(tmp_path: Path) -> None:
    class Forgetful(Classifier):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            optimizer.step()

    with pytest.raises(UserError, match="never called its closure"):
        fit(Forgetful(), Points(), tmp_path / "run", 1)


def _made(make: Any, batch_size: int) -> tuple[Any, Any]:
    torch.manual_seed(1)
    return make(), Points(batch_size, 64)


@pytest.mark.slow
@pytest.mark.parametrize("make", [OwnBackward, OwnZeroGrad, StrongWolfe, SharpnessAware])
def test_two_ranks_take_the_steps_of_one(make: Any, tmp_path: Path) -> None:
    options = {"train__epochs": 2, "train__precision": "64"}
    one = fit_on(1, tmp_path / "one", partial(_made, make, 8), **options)
    two = fit_on(2, tmp_path / "two", partial(_made, make, 4), **options)
    alone, together = (read(run.checkpoint("last"))[0]["model"] for run in (one, two))
    for name, tensor in alone.items():
        torch.testing.assert_close(
            together[name], tensor, rtol=1e-7, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.slow
def test_a_step_that_is_skipped_by_one_of_several_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="training_step returned None, by which a step is skipped"):
        fit_on(2, tmp_path, partial(_made, Skipping, 4), train__epochs=1)


class Impatient(Told):
    """Ends some epochs early."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        self.tell("on_train_batch_start", self.current_epoch, batch_idx)
        return -1 if (self.current_epoch, batch_idx) in ((0, 5), (2, 0)) else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tell("on_train_batch_end", batch_idx)

    def on_validation_start(self) -> None:
        self.tell("on_validation_start")

    def on_train_epoch_end(self) -> None:
        self.tell("on_train_epoch_end", self.current_epoch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        schedulers = torch.optim.lr_scheduler
        of_step = {"scheduler": schedulers.ExponentialLR(optimizer, 0.9), "interval": "step"}
        return [optimizer], [of_step, schedulers.StepLR(optimizer, 1, 0.7)]


class ImpatientByHand(Impatient):
    """The same, with manual optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize("make", [Impatient, ImpatientByHand])
def test_the_rest_of_an_epoch_is_skipped_as_under_lightning(make: Any, tmp_path: Path) -> None:
    ours, theirs, *_ = both(make, tmp_path, epochs=4)
    assert_same_weights(ours, theirs)
    assert ours.calls == theirs.calls


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 5, 8, 13])
@pytest.mark.parametrize("make", [Impatient, ImpatientByHand])
def test_skipped_epochs_do_not_notice_a_stop(make: Any, step: int, tmp_path: Path) -> None:
    straight, stopped = pair(make)
    again = deepcopy(stopped)
    fit(straight, Points(), tmp_path / "straight", 4)
    with pytest.raises(Stopped):
        fit(stopping(stopped, step), Points(), tmp_path / "stopped", 4)
    fit(again, Points(), tmp_path / "stopped", 4)
    assert_same_weights(straight, again)
    assert again.calls == straight.calls
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight")


class ImpatientCaptured(Bare):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == (9, 14)[self.current_epoch % 2] else None


@pytest.mark.slow
@pytest.mark.usefixtures("recorded_graphs")
def test_an_epoch_is_skipped_between_replays(tmp_path: Path) -> None:
    runs = {}
    for program in ("eager", "auto"):
        torch.manual_seed(1)
        data = Points(num_train=160)
        runs[program] = fit(ImpatientCaptured(), data, tmp_path / program, 4, **{"train.program": program})
    assert runs["auto"].record["decided"]["program"] == "graphed", runs["auto"].record["decided"]["why"]
    assert sha(runs["auto"]) == sha(runs["eager"])


@pytest.mark.slow
def test_skipping_an_epoch_on_several_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"returned -1 on .*others would wait"):
        fit_on(2, tmp_path, partial(_made, Impatient, 4), train__epochs=1)


class Modes(Told):
    """Leaves batch norm in training mode where it validates."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(self.norm(inputs))

    def on_validation_model_eval(self) -> None:
        self.tell("on_validation_model_eval", self.training)
        self.net.eval()
        self.norm.train(not self.trainer.sanity_checking)

    def on_validation_model_train(self) -> None:
        self.tell("on_validation_model_train", self.net.training, self.norm.training)
        self.train()
        self.norm.train(self.trainer.sanity_checking)


def test_modes_of_an_evaluation_are_the_modules_own(tmp_path: Path) -> None:
    ours, theirs, *_ = both(Modes, tmp_path, epochs=2)
    assert_same_weights(ours, theirs)
    assert ours.calls == theirs.calls


class LazyLinear(nn.LazyLinear):
    """The same weights wherever it learns its shape."""

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if not self.has_uninitialized_params() and self.in_features:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.copy_(torch.linspace(-0.5, 0.5, parameter.numel()).view_as(parameter))


class Lazy(Told):
    """Layers, a norm among them, that learn their shapes from the first batch; one is used before them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.BatchNorm1d(6), LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh(), LazyLinear(3), nn.BatchNorm1d(3)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.tell("training_step", torch.is_grad_enabled(), batch_idx)
        return super().training_step(batch, batch_idx)


def test_lazy_modules_learn_their_shapes_from_the_first_batch(tmp_path: Path) -> None:
    torch.manual_seed(1)
    ours, theirs = Lazy(), Lazy()
    state = torch.get_rng_state()
    fit(ours, Points(), tmp_path / "run", 2)
    assert torch.equal(torch.get_rng_state(), state)
    fit_lightning(theirs, Points(), 2)
    assert_same_weights(ours, theirs)
    assert ours.calls == theirs.calls


class PlainLazy(Bare):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(8), nn.Dropout(0.5), nn.Tanh(), nn.LazyLinear(3))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


@pytest.mark.slow
def test_lazy_modules_begin_alike_in_every_start_and_on_every_rank(tmp_path: Path) -> None:
    straight = fit(PlainLazy(), Points(), tmp_path / "straight", 2)
    with pytest.raises(Stopped):
        fit(stopping(PlainLazy(), 11), Points(), tmp_path / "stopped", 2)
    torch.manual_seed(5)
    assert sha(fit(PlainLazy(), Points(), tmp_path / "stopped", 2)) == sha(straight)
    assert sha(fit(PlainLazy(), Points(), tmp_path / "seed", 2, seed=3)) != sha(straight)
    options = {"train__epochs": 2, "parallel__reduce": "tree", "parallel__shards": 2}
    assert sha(fit_on(2, tmp_path / "two", partial(_made, PlainLazy, 4), **options)) == sha(
        fit_on(1, tmp_path / "one", partial(_made, PlainLazy, 8), **options)
    )
    run = isoscale.Run(tmp_path / "straight", PlainLazy(), Points())
    assert isoscale.predict(run, split="val")["prediction"].shape == (30, 3)


class Adversaries(modules.Adversarial):
    """Two networks whose optimizers are used in all the ways there are."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append(("before", type(optimizer).__name__, self.global_step))

    def backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        self.calls.append(("backward", sorted(options)))
        loss.backward(*arguments, **options)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, (first, second) = batch[0], self.optimizers()
        bare = self.optimizers(use_pl_optimizer=False)
        self.calls.append((isinstance(first, torch.optim.Adam), isinstance(second, torch.optim.Optimizer)))
        self.calls.append(
            (first.optimizer is bare[0], first.param_groups is bare[0].param_groups, type(first).__name__)
        )
        self.calls.append((self.optimizers()[0] is first, bare == self.trainer.optimizers, first.defaults["lr"]))

        def closure() -> Tensor:
            loss = -self.critic(self.generator(real[:, :2])).mean()
            first.zero_grad()
            self.manual_backward(loss, retain_graph=True)
            return loss

        with first.toggle_model(sync_grad=batch_idx % 2 == 0):
            self.calls.append([parameter.requires_grad for parameter in self.parameters()])
            self.calls.append(("stepped", round(float(first.step(closure=closure)), 5), self.global_step))
        self.calls.append([parameter.requires_grad for parameter in self.parameters()])
        self.toggle_optimizer(second)
        loss = self.critic(self.generator(real[:, :2]).detach()).mean() - self.critic(real).mean()
        self.manual_backward(loss / 2)  # over two batches
        if batch_idx % 2:
            self.clip_gradients(second, gradient_clip_val=0.05, gradient_clip_algorithm="value")
            second.step()
            second.zero_grad()
        self.untoggle_optimizer(second)
        if batch_idx == 3:  # of which nobody hears
            bare[0].step()
        for scheduler in self.lr_schedulers():
            self.lr_scheduler_step(scheduler, None)
        self.calls.append(("end", self.global_step, second.param_groups[0]["lr"], sorted(first.state_dict())))

    def on_train_epoch_end(self) -> None:
        """Nothing."""


class KeepingItsOptimizer(Bare):
    """An optimizer, as the module gets it, in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization, self.mine = False, None

    def on_train_start(self) -> None:
        self.mine = self.optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.mine.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.mine.step()


@pytest.mark.parametrize("make", [Adversaries, KeepingItsOptimizer])
def test_optimizers_are_what_lightning_gives_to_a_module(make: Any, tmp_path: Path) -> None:
    ours, theirs, *_ = both(make, tmp_path, epochs=2)
    assert_same_weights(ours, theirs)
    assert getattr(ours, "calls", None) == getattr(theirs, "calls", None)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Adversaries, KeepingItsOptimizer])
def test_optimizers_of_a_module_do_not_notice_a_stop(make: Any, tmp_path: Path) -> None:
    straight, stopped = pair(make)
    again = deepcopy(stopped)
    fit(straight, Points(), tmp_path / "straight", 2)
    with pytest.raises(Stopped):
        fit(stopping(stopped, 11), Points(), tmp_path / "stopped", 2)
    fit(again, Points(), tmp_path / "stopped", 2)
    assert_same_weights(straight, again)
    assert getattr(again, "seen", None) == getattr(straight, "seen", None)
    assert "cannot be saved" not in (tmp_path / "stopped" / "log.txt").read_text()


class Clipping(Told):
    """Clips by what the trainer was told."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.tell("clip", gradient_clip_val)
        self.clip_gradients(optimizer, gradient_clip_algorithm="norm")


def test_clipping_of_ones_own_gets_the_value_of_the_recipe(tmp_path: Path) -> None:
    ours, theirs, *_ = both(Clipping, tmp_path, epochs=1, gradient_clip_val=0.02, overrides={"train.clip": 0.02})
    assert_same_weights(ours, theirs)
    assert ours.calls == theirs.calls


class Looking(Told):
    """Asks for everything that a LightningModule knows of where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(2, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        gathered = self.all_gather({"a": batch[0], "b": [1.5, batch[1]]})
        self.tell("all_gather", gathered["a"].shape, gathered["b"][0].shape, gathered["b"][1].dtype)
        self.tell(
            "is", str(self.device), str(self.dtype), self.local_rank, self.global_rank, self.fabric, self.device_mesh
        )
        self.tell(
            "has", self.strict_loading, self.hparams.width, self.example_input_array.shape, self.automatic_optimization
        )
        return super().training_step(batch, batch_idx)

    def on_train_epoch_start(self) -> None:
        self.freeze()
        self.tell("frozen", [parameter.requires_grad for parameter in self.parameters()], self.training)
        self.unfreeze()
        self.tell("unfrozen", [parameter.requires_grad for parameter in self.parameters()], self.training)
        self.print("hello")


@pytest.mark.parametrize("precision", ["32", "64"])
def test_a_module_finds_where_it_is(precision: str, tmp_path: Path) -> None:
    ours, theirs, *_ = both(
        Looking, tmp_path, epochs=1, precision=f"{precision}-true", overrides={"train.precision": precision}
    )
    assert_same_weights(ours, theirs)
    assert ours.calls == theirs.calls


class Gathering(Told):
    """A loss over the outputs of all ranks, as contrastive learning has it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self(batch[0])
        every, labels = self.all_gather(scores, sync_grads=True), self.all_gather(batch[1])
        if self.trainer.world_size > 1:
            assert every.shape == (2, 4, 3) and torch.equal(every[self.global_rank].detach(), scores.detach())
            assert (
                not torch.equal(every[0], every[1]) and self.all_gather(batch_idx > 2).tolist() == [batch_idx > 2] * 2
            )
        return nn.functional.cross_entropy(every.reshape(-1, 3), labels.reshape(-1))


@pytest.mark.slow
def test_all_gather_gathers_from_all_ranks(tmp_path: Path) -> None:
    options = {"train__epochs": 2, "train__precision": "64"}
    one = fit_on(1, tmp_path / "one", partial(_made, Gathering, 8), **options)
    two = fit_on(2, tmp_path / "two", partial(_made, Gathering, 4), **options)
    alone, together = (read(run.checkpoint("last"))[0]["model"] for run in (one, two))
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "argument"),
    [("on_validation_epoch_end", "outputs"), ("on_predict_epoch_end", "results"), ("optimizer_step", "optimizer_idx")],
)
def test_arguments_that_hooks_are_not_given_any_more_are_refused(name: str, argument: str, tmp_path: Path) -> None:
    scope: dict[str, Any] = {}
    exec(f"def hook(self, {argument}): ...", scope)
    with pytest.raises(UserError, match=rf"{name} of Module takes {argument}, as in Lightning 1"):
        fit(type("Module", (Classifier,), {name: scope["hook"]})(), Points(), tmp_path / "run", 1)
