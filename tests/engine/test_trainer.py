"""How a training behaves, from the outside: how long it is, what it sees, when it ends, and what it refuses."""

import json
import math
import pickle
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import isoscale
from isoscale.engine.state.checkpoint import Checkpoints, read, read_weights
from isoscale.errors import UserError
from tests.helpers import first_step, sha, timeless

FEATURES = 4
BASE: dict[str, Any] = {
    "data.batch_size": 10,
    "train.epochs": 2,
    "train.threads": 1,
    "train.device": "cpu",
    "optimizer.lr": 0.01,
    "observe.every": 3,
    "observe.level": "error",
    "observe.tensorboard": 0,
}


def rows(count: int, seed: int = 0) -> dict[str, Tensor]:
    """Points, which of two classes they belong to, and their number."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(count, FEATURES, generator=generator)
    return {"input": points, "target": (points.sum(1) > 0).long(), "number": torch.arange(count)}


def sources(train: int = 95, val: int = 37, seed: int = 0) -> isoscale.Sources:
    return isoscale.Sources(train=rows(train, seed), val=rows(val, seed + 1), test=rows(val, seed + 2))


class Watched(isoscale.Supervised):
    """Remembers which samples it saw."""

    def __init__(self, model: nn.Module | None = None) -> None:
        torch.manual_seed(7)
        made = model or nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 2))
        super().__init__(made, "cross_entropy", ["accuracy"])
        self.trained: list[list[int]] = []
        self.validated: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trained.append(batch["number"].tolist())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.validated.append(batch["number"].tolist())
        return super().validation_step(batch, batch_idx)


def fit(path: Path, task: nn.Module | None = None, data: Any = None, **keys: Any) -> isoscale.Run:
    """Train quietly; keys are written with double underscores for points."""
    overrides = {**BASE, **{key.replace("__", "."): value for key, value in keys.items()}}
    return isoscale.Trainer({}, run=path, **overrides).fit(
        Watched() if task is None else task, sources() if data is None else data
    )


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def steps(run: isoscale.Run, name: str) -> list[int]:
    return [step for step, _ in run.history(name)]


class TestLength:
    """Which samples are seen, and for how long."""

    def test_an_epoch_sees_every_sample_once_and_the_next_in_another_order(self, tmp_path: Path) -> None:
        task = Watched()
        fit(tmp_path / "run", task)
        assert [len(batch) for batch in task.trained] == [*[10] * 9, 5] * 2
        first, second = flat(task.trained[:10]), flat(task.trained[10:])
        assert sorted(first) == sorted(second) == list(range(95))
        assert first != second != sorted(second)

    def test_without_shuffling_the_order_is_that_of_the_source(self, tmp_path: Path) -> None:
        task = Watched()
        fit(tmp_path / "run", task, data__shuffle=False)
        assert flat(task.trained) == list(range(95)) * 2

    def test_drop_last_leaves_out_the_ragged_batch(self, tmp_path: Path) -> None:
        task = Watched()
        fit(tmp_path / "run", task, data__drop_last=True)
        assert [len(batch) for batch in task.trained] == [10] * 18

    @pytest.mark.parametrize(("limit", "expected"), [(3, 3), (0.5, 5), (1.0, 10), (1, 1), (0.01, 1), (99, 10)])
    def test_train_batches_are_limited_by_a_number_or_a_fraction(
        self, limit: float, expected: int, tmp_path: Path
    ) -> None:
        task = Watched()
        run = fit(tmp_path / "run", task, train__limit_train_batches=limit)
        assert len(task.trained) == 2 * expected
        assert steps(run, "train/loss_epoch") == [expected, 2 * expected]

    @pytest.mark.parametrize(("limit", "expected"), [(2, 20), (0.5, 20), (99, 37)])
    def test_validation_batches_are_limited_by_a_number_or_a_fraction(
        self, limit: float, expected: int, tmp_path: Path
    ) -> None:
        task = Watched()
        fit(tmp_path / "run", task, train__limit_val_batches=limit)
        rehearsal = 10
        assert flat(task.validated)[rehearsal:] == list(range(expected)) * 2

    @pytest.mark.parametrize("limit", [0, 1.5, -1])
    def test_a_limit_that_makes_no_sense_is_refused(self, limit: float, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="limit_train_batches"):
            fit(tmp_path / "run", train__limit_train_batches=limit)

    def test_overfitting_trains_and_validates_on_the_same_few_batches(self, tmp_path: Path) -> None:
        task = Watched()
        fit(tmp_path / "run", task, train__overfit_batches=2, train__epochs=3)
        seen = set(flat(task.trained))
        assert len(seen) == 20 and len(task.trained) == 6
        assert set(flat(task.validated)) == seen

    @pytest.mark.parametrize(("subset", "expected"), [(30, 30), (0.2, 19), (1.0, 95)])
    def test_a_subset_has_the_same_rows_whatever_the_seed(self, subset: float, expected: int, tmp_path: Path) -> None:
        one, two = Watched(), Watched()
        fit(tmp_path / "one", one, data__subset=subset)
        fit(tmp_path / "two", two, data__subset=subset, seed=5)
        assert len(set(flat(one.trained))) == expected
        assert set(flat(one.trained)) == set(flat(two.trained))

    def test_a_subset_or_batch_larger_than_the_data_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="asks for 96 samples, but there are 95"):
            fit(tmp_path / "run", data__subset=96)
        with pytest.raises(UserError, match=r"only 95 training samples; use data.batch_size=95 or less"):
            fit(tmp_path / "run", data__batch_size=96)
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("length", "expected"),
        [({"epochs": 2, "steps": 7}, 7), ({"epochs": 1, "steps": 70}, 10), ({"epochs": None, "steps": 23}, 23)],
    )
    def test_training_ends_at_epochs_or_steps_whichever_comes_first(
        self, length: dict[str, Any], expected: int, tmp_path: Path
    ) -> None:
        run = fit(tmp_path / "run", **{f"train__{key}": value for key, value in length.items()})
        assert run.record["step"] == run.record["num_steps"] == expected
        assert steps(run, "train/loss")[-1] == expected


class TestEvaluation:
    """When and on what the validation happens."""

    @pytest.mark.parametrize(
        ("cadence", "expected"),
        [("1 epoch", [10, 20]), ("2 epochs", [20]), ("8 steps", [8, 16, 20]), ("never", []), (7, [7, 14, 20])],
    )
    def test_evaluation_happens_at_its_cadence_and_at_the_end(
        self, cadence: Any, expected: list[int], tmp_path: Path
    ) -> None:
        task = Watched()
        run = fit(tmp_path / "run", task, train__evaluate=cadence)
        assert steps(run, "val/loss") == expected
        assert steps(run, "val/accuracy") == expected
        if not expected:
            assert not task.validated

    @pytest.mark.parametrize("size", [1, 8, 36, 37, 1000])
    def test_every_sample_counts_once_whatever_the_evaluation_batch(self, size: int, tmp_path: Path) -> None:
        task = Watched()
        run = fit(tmp_path / "run", task, data__eval_batch_size=size)
        per_epoch = math.ceil(37 / min(size, 37))
        rehearsed = task.validated[1:]
        assert flat(rehearsed[:per_epoch]) == flat(rehearsed[per_epoch:]) == list(range(37))
        batch = rows(37, 1)
        scores = run.task("last").model(batch["input"]).detach()  # type: ignore[operator]
        loss = float(functional.cross_entropy(scores, batch["target"]))
        assert run.metrics["val/loss"] == pytest.approx(loss, rel=1e-5)
        assert run.metrics["val/accuracy"] == pytest.approx(
            float((scores.argmax(1) == batch["target"]).double().mean()), rel=1e-12
        )

    def test_the_epoch_mean_of_the_training_loss_is_that_of_all_samples(self, tmp_path: Path) -> None:
        run = fit(tmp_path / "run", optimizer__lr=1e-30, train__epochs=1)
        batch = rows(95)
        loss = functional.cross_entropy(Watched().model(batch["input"]), batch["target"])
        assert run.metrics["train/loss_epoch"] == pytest.approx(float(loss.detach()), rel=1e-6)


class TestEnding:
    """Early stopping and plateau."""

    STALLED = {"optimizer__lr": 1e-12, "train__epochs": 12}

    def test_early_stopping_ends_the_training_and_it_stays_ended(self, tmp_path: Path) -> None:
        stop = {"train__early_stopping": {"patience": 3, "min_delta": 1e-3}, **self.STALLED}
        first, task = Watched(), Watched()
        run = fit(tmp_path / "run", first, **stop)
        assert run.record["step"] == 40 and run.status == "done"
        before, lines = sha(run), timeless(run)
        again = fit(tmp_path / "run", task, **stop)
        assert (sha(again), timeless(again), task.trained) == (before, lines, first.trained)
        assert again.record["step"] == 40

    def test_early_stopping_goes_on_counting_after_a_restart(self, tmp_path: Path) -> None:
        stop = {**self.STALLED, "train__early_stopping": {"patience": 5, "min_delta": 1e-3}}
        fit(tmp_path / "run", **{**stop, "train__epochs": 3})
        assert fit(tmp_path / "run", **stop).record["step"] == 60

    def test_plateau_drops_the_learning_rate_when_the_metric_stalls(self, tmp_path: Path) -> None:
        run = fit(
            tmp_path / "run",
            **{**self.STALLED, "train__epochs": 6},
            schedule={"name": "plateau", "patience": 1, "gamma": 0.5, "threshold": 0.01},
        )
        rates = dict(run.history("lr"))
        assert [rates[step] / 1e-12 for step in (10, 30, 40, 50, 60)] == pytest.approx([1, 1, 0.5, 0.5, 0.25])

    def test_plateau_goes_on_after_a_restart(self, tmp_path: Path) -> None:
        schedule = {"name": "plateau", "patience": 0, "gamma": 0.3, "threshold": 0.3}
        whole = fit(tmp_path / "whole", schedule=schedule, train__epochs=6)
        fit(tmp_path / "cut", schedule=schedule, train__epochs=3)
        cut = fit(tmp_path / "cut", schedule=schedule, train__epochs=6)
        assert sha(cut) == sha(whole) and timeless(cut) == timeless(whole)
        assert len({value for _, value in whole.history("lr")}) > 1

    @pytest.mark.parametrize(
        ("key", "value", "nearest"),
        [
            ("checkpoint.monitor", "val/acuracy", "val/accuracy"),
            ("train.early_stopping.monitor", "val/los", "val/loss"),
            ("schedule.monitor", "val_loss", "val/loss"),
            ("checkpoint.monitor", "train/loss", "train/loss_epoch"),
        ],
    )
    def test_a_misspelt_monitor_is_an_error_before_training_with_the_nearest_name(
        self, key: str, value: str, nearest: str, tmp_path: Path
    ) -> None:
        task = Watched()
        more = {"schedule__name": "plateau"} if key.startswith("schedule") else {}
        with pytest.raises(UserError, match=f"{key} is '{value}'.*did you mean '{nearest}'"):
            fit(tmp_path / "run", task, **{key: value}, **more)
        assert not task.trained
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize("options", [{"train__early_stopping": {}}, {"schedule__name": "plateau"}])
    def test_what_steers_by_an_evaluation_that_never_happens_is_refused(
        self, options: dict[str, Any], tmp_path: Path
    ) -> None:
        with pytest.raises(UserError, match="nothing is evaluated"):
            fit(tmp_path / "one", train__evaluate="never", **options)
        with pytest.raises(UserError, match="nothing is evaluated"):
            fit(tmp_path / "two", data=isoscale.Sources(train=rows(95)), **options)

    def test_the_training_loss_can_steer_where_nothing_is_evaluated(self, tmp_path: Path) -> None:
        stop = {"patience": 2, "monitor": "train/loss_epoch", "min_delta": 1e-3}
        run = fit(tmp_path / "run", train__evaluate="never", train__early_stopping=stop, **self.STALLED)
        assert run.record["step"] == 30


class TestWeights:
    """Which weights a run returns, and which it starts from."""

    def test_the_moving_average_is_what_is_evaluated_and_returned(self, tmp_path: Path) -> None:
        task = Watched()
        run = fit(tmp_path / "run", task, train__ema=0.9)
        trained = [parameter.detach().clone() for parameter in task.parameters()]
        batch = rows(37, 1)
        scores = run.task("last").model(batch["input"]).detach()  # type: ignore[operator]
        loss = float(functional.cross_entropy(scores, batch["target"]))
        assert run.metrics["val/loss"] == pytest.approx(loss, rel=1e-5)
        averaged = list(run.task("last").parameters())
        assert not any(torch.equal(*pair) for pair in zip(trained, averaged, strict=True))
        plain = fit(tmp_path / "plain", reference := Watched())
        assert all(torch.equal(*pair) for pair in zip(trained, reference.parameters(), strict=True))
        stored = read_weights(run.checkpoint("last"), average=False)
        last = read_weights(plain.checkpoint("last"))
        assert all(torch.equal(stored[name], tensor) for name, tensor in last.items())

    def test_the_best_checkpoint_is_the_one_with_the_best_metric(self, tmp_path: Path) -> None:
        run = fit(tmp_path / "run", train__epochs=8, optimizer__lr=0.3, checkpoint__keep=2)
        history = run.history("val/loss")
        step, value = min(history, key=lambda entry: entry[1])
        assert step < 70, "it is none of the two newest, which are kept anyway"
        assert run.record["best"] == {"name": "val/loss", "value": value, "step": step}
        assert run.checkpoint().name == f"step_{step:08d}"
        batch = rows(37, 1)
        scores = run.task().model(batch["input"]).detach()  # type: ignore[operator]
        assert float(functional.cross_entropy(scores, batch["target"])) == pytest.approx(value, rel=1e-5)

    def test_a_model_with_batch_norm_comes_back_with_its_own_dtypes(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        run = fit(tmp_path / "run", Watched(model))
        found = run.model("last").state_dict()
        assert found["1.num_batches_tracked"].dtype == torch.int64 and int(found["1.num_batches_tracked"]) == 20
        assert {found[name].dtype for name in ("0.weight", "1.weight", "1.running_var")} == {torch.float32}
        assert not torch.equal(found["1.running_mean"], torch.zeros(8))

    def start(self, path: Path, where: Any, task: nn.Module | None = None) -> dict[str, Tensor]:
        """The weights that a run which does not learn ends with: those it started from."""
        run = fit(path, task, **{"task.init_from": where, "optimizer.lr": 1e-30, "train.steps": 1})
        return read_weights(run.checkpoint("last"))

    @pytest.fixture
    def earlier(self, tmp_path: Path) -> isoscale.Run:
        return fit(tmp_path / "earlier", train__ema=0.5)

    def test_a_run_starts_from_the_best_weights_of_another(self, earlier: isoscale.Run, tmp_path: Path) -> None:
        expected = read_weights(earlier.checkpoint())
        for number, where in enumerate((earlier.path, earlier.checkpoint())):
            found = self.start(tmp_path / str(number), str(where))
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

    def test_excluded_weights_stay_as_they_were_initialised(self, earlier: isoscale.Run, tmp_path: Path) -> None:
        expected, fresh = read_weights(earlier.checkpoint()), Watched().state_dict()
        found = self.start(tmp_path / "run", {"run": str(earlier.path), "exclude": ["model.2.*"]})
        assert all(
            torch.equal(found[name], (fresh if name.startswith("model.2") else expected)[name]) for name in expected
        )

    def test_a_new_head_of_another_size_is_started_by_excluding_the_old(
        self, earlier: isoscale.Run, tmp_path: Path
    ) -> None:
        wider = Watched(nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 5)))
        with pytest.raises(UserError, match=r"model.2.bias is \(2,\), expected \(5,\)"):
            self.start(tmp_path / "one", str(earlier.path), deepcopy(wider))
        found = self.start(tmp_path / "two", {"run": str(earlier.path), "exclude": ["model.2.*"]}, deepcopy(wider))
        assert torch.equal(found["model.0.weight"], read_weights(earlier.checkpoint())["model.0.weight"])

    @pytest.mark.parametrize("form", ["safetensors", "pt", "nested pt"])
    def test_weights_come_from_files_of_others_too(self, form: str, tmp_path: Path) -> None:
        weights = {name: torch.randn_like(tensor) for name, tensor in Watched().state_dict().items()}
        path = tmp_path / f"weights.{form.split()[-1]}"
        if form == "safetensors":
            save_file(weights, path)
        else:
            torch.save({"state_dict": weights, "epoch": 3} if "nested" in form else weights, path)
        found = self.start(tmp_path / "run", str(path))
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())

    def test_buffers_that_torch_does_not_save_may_be_missing_from_a_file(self, tmp_path: Path) -> None:
        task = Watched()
        task.register_buffer("table", torch.arange(3.0), persistent=False)
        torch.save(task.state_dict(), tmp_path / "weights.pt")
        assert self.start(tmp_path / "run", str(tmp_path / "weights.pt"), task)["table"].tolist() == [0.0, 1.0, 2.0]

    def test_every_mismatch_is_named(self, tmp_path: Path) -> None:
        weights = dict(Watched().state_dict())
        weights["model.9.weight"] = weights.pop("model.2.weight")
        save_file(weights, tmp_path / "other.safetensors")
        with pytest.raises(UserError, match=r"no weights for model.2.weight; unexpected model.9.weight"):
            self.start(tmp_path / "run", str(tmp_path / "other.safetensors"))
        assert not (tmp_path / "run").exists()

    def test_a_file_that_would_run_code_is_refused_and_does_not_run_it(self, tmp_path: Path) -> None:
        class Malicious:
            def __reduce__(self) -> Any:
                return Path.touch, (tmp_path / "pwned",)

        torch.save({"model.0.weight": Malicious()}, tmp_path / "evil.pt")
        (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Malicious()))
        for name in ("evil.pt", "evil.pkl"):
            with pytest.raises(UserError, match="cannot read weights"):
                self.start(tmp_path / "run", str(tmp_path / name))
        assert not (tmp_path / "pwned").exists()

    def test_what_is_not_a_file_of_weights_is_refused(self, tmp_path: Path) -> None:
        torch.save(torch.zeros(3), tmp_path / "tensor.pt")
        (tmp_path / "broken.safetensors").write_bytes(b"nonsense")
        for name, words in (
            ("tensor.pt", "holds no weights by name"),
            ("broken.safetensors", "cannot read weights"),
            ("nowhere", "there is no run, checkpoint or file"),
        ):
            with pytest.raises(UserError, match=words):
                self.start(tmp_path / "run", str(tmp_path / name))


class TestNotFinite:
    """A loss or gradient that is NaN or infinite."""

    def poisoned(self, value: float = math.nan) -> isoscale.Sources:
        """The sample of the 8th step is bad."""
        data = rows(95)
        data["input"][75] = value
        return isoscale.Sources(train=data, val=rows(37, 1))

    @pytest.mark.slow
    @pytest.mark.parametrize("value", [math.nan, math.inf])
    @pytest.mark.parametrize("every", [1, 3, 50])
    @pytest.mark.parametrize("cadence", ["1 steps", "1 epoch"])
    def test_training_stops_with_a_clear_message_and_weights_from_before(
        self, value: float, every: int, cadence: str, tmp_path: Path
    ) -> None:
        task = Watched()
        options = {"data__shuffle": False, "observe__every": every, "checkpoint__every": cadence}
        with pytest.raises(UserError, match=r"between step \d+ and step \d+.*what was saved before is good"):
            fit(tmp_path / "run", task, self.poisoned(value), **options)
        good = fit(tmp_path / "good", reference := Watched(), **{**options, "train__steps": 7})
        assert good.status == "done"
        assert all(torch.equal(*pair) for pair in zip(task.parameters(), reference.parameters(), strict=True))
        run = isoscale.Run(tmp_path / "run")
        assert run.status == "failed" and "NaN or infinite" in run.record["message"]

    @pytest.mark.slow
    @pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
    @pytest.mark.parametrize("options", [{}, {"train__accumulate": 2}, {"parallel__reduce": "tree"}])
    def test_nothing_that_is_not_finite_is_ever_saved(
        self, optimizer: str, options: dict[str, Any], tmp_path: Path
    ) -> None:
        with pytest.raises(UserError, match="NaN or infinite"):
            fit(
                tmp_path / "run",
                data=self.poisoned(),
                data__shuffle=False,
                observe__every=50,
                checkpoint__every="1 steps",
                optimizer__name=optimizer,
                **options,
            )
        found = Checkpoints(tmp_path / "run" / "checkpoints").newest(lambda text: pytest.fail(text))
        assert found is not None and found[0].name == "step_00000007"
        assert all(bool(tensor.isfinite().all()) for group in found[1][0].values() for tensor in group.values())

    @pytest.mark.slow
    def test_a_run_goes_on_from_its_last_good_checkpoint_when_the_cause_is_gone(self, tmp_path: Path) -> None:
        class Fragile(Watched):
            broken = True

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                pair = super().training_step(batch, batch_idx)
                return (
                    pair
                    if batch_idx != 7 or not self.broken
                    else isoscale.WeightedSum(pair.sum * math.nan, pair.weight)
                )

        options = {"checkpoint__every": "1 steps"}
        with pytest.raises(UserError, match="NaN or infinite"):
            fit(tmp_path / "run", Fragile(), **options)
        Fragile.broken = False
        again = fit(tmp_path / "run", Fragile(), **options)
        assert first_step(again) == 7 and sha(again) == sha(fit(tmp_path / "whole", **options))

    @pytest.mark.parametrize("options", [{}, {"train__accumulate": 2}, {"parallel__reduce": "tree"}])
    def test_a_gradient_that_is_nan_behind_a_finite_loss_is_noticed(
        self, options: dict[str, Any], tmp_path: Path
    ) -> None:
        class Kinked(Watched):
            def training_step(self, batch: Any, batch_idx: int) -> Any:
                pair = super().training_step(batch, batch_idx)
                root = (0.0 * pair.sum).sqrt() if batch_idx == 4 else 0.0  # 0, with a slope that is NaN
                return isoscale.WeightedSum(pair.sum + root, pair.weight)

        task = Kinked()
        with pytest.raises(UserError, match=r"NaN or infinite between step 3 and step 6 \(mean loss 0\.\d+\)"):
            fit(tmp_path / "run", task, **options)
        assert all(bool(parameter.isfinite().all()) for parameter in task.parameters())

    def test_a_metric_that_is_nan_does_not_end_the_training(self, tmp_path: Path) -> None:
        class Odd(Watched):
            def validation_step(self, batch: Any, batch_idx: int) -> Any:
                self.log("odd", torch.tensor(math.nan))
                return super().validation_step(batch, batch_idx)

        run = fit(tmp_path / "run", Odd(), checkpoint__monitor="val/odd")
        assert run.status == "done" and math.isnan(run.metrics["val/odd"])
        assert run.record["best"]["value"] is None


class Terms(Watched):
    """A loss of two named terms."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scores = self.model(batch["input"])
        return {
            "fit": functional.cross_entropy(scores, batch["target"]),
            "size": isoscale.WeightedSum(scores.square().sum(), scores.numel()),
        }


class TestLossWeights:
    """Named terms of a loss."""

    @pytest.mark.parametrize(
        "options", [{}, {"train__accumulate": 3}, {"parallel__reduce": "tree"}], ids=["whole", "accumulate", "tree"]
    )
    def test_the_loss_is_the_weighted_sum_of_its_terms_and_all_are_logged(
        self, options: dict[str, Any], tmp_path: Path
    ) -> None:
        weights = {"fit": 0.5, "size": {"start": 2.0, "end": 4.0}}
        run = fit(tmp_path / "run", Terms(), train__loss_weights=weights, observe__every=1, train__steps=11, **options)
        fits, sizes, losses = (run.history(f"train/{name}") for name in ("fit", "size", "loss"))
        assert len(losses) == 11
        for (step, loss), (_, first), (_, second) in zip(losses, fits, sizes, strict=True):
            assert loss == pytest.approx(0.5 * first + (2 + 2 * (step - 1) / 10) * second, rel=1e-5)

    def test_a_weight_steers_what_is_learnt(self, tmp_path: Path) -> None:
        ends = [
            fit(tmp_path / str(weight), Terms(), train__loss_weights={"size": weight}, train__epochs=5).metrics
            for weight in (0.0, 10.0)
        ]
        assert ends[1]["train/size"] < ends[0]["train/size"] and ends[1]["train/fit"] > ends[0]["train/fit"]

    def test_a_weight_without_a_term_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="names 'fti', but the terms of the loss are fit, size; did you mean 'fit'"):
            fit(tmp_path / "run", Terms(), train__loss_weights={"fti": 2.0})

    def test_a_weight_that_follows_a_rate_which_nobody_trains_with_is_refused(self, tmp_path: Path) -> None:
        class Own(Terms):
            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        moving = {"size": {"start": 2.0, "end": 4.0, "follows": "rate"}}
        with pytest.raises(UserError, match=r"its own optimizer; use train\.loss_weights\.size\.follows=steps"):
            fit(tmp_path / "run", Own(), train__loss_weights=moving)


class TestRecord:
    """What run.json says, and what a run that is continued refuses."""

    def test_the_record_holds_provenance_decisions_and_the_end(self, tmp_path: Path) -> None:
        run = fit(tmp_path / "run", seed=3)
        record = json.loads((tmp_path / "run" / "run.json").read_text())
        assert record["isoscale"] == isoscale.__version__
        assert record["packages"]["torch"] == torch.__version__
        assert record["seed"] == 3 and record["given"] == "Watched"
        assert record.keys() >= {"python", "host", "platform", "command", "started", "code", "seconds", "peak_memory"}
        decided = record["decided"]
        assert (decided["device"], decided["threads"], decided["precision"]) == ("cpu", 1, "32")
        assert decided["program"] == "eager" and decided["optimizer"]["fused"] is True
        assert (record["status"], record["step"], record["epoch"], record["num_steps"]) == ("done", 20, 2, 20)
        assert record["best"]["name"] == "val/loss" and record["best"]["value"] == run.metrics["val/loss"]
        assert record["data"].keys() == {"train", "val"} and record["data"]["train"] != record["data"]["val"]

    def test_fingerprints_follow_the_data_and_nothing_else(self, tmp_path: Path) -> None:
        one = fit(tmp_path / "one").record["data"]
        two = fit(tmp_path / "two", seed=9, data__batch_size=7).record["data"]
        three = fit(tmp_path / "three", data=sources(seed=1)).record["data"]
        assert one == two
        assert one["train"] != three["train"]

    def snapshot(self, path: Path) -> dict[str, bytes]:
        return {
            str(file.relative_to(path)): file.read_bytes()
            for file in path.rglob("*")
            if file.is_file() and file.name not in ("log.txt",)
        }

    @pytest.mark.parametrize("split", ["train", "val"])
    def test_changed_data_is_refused_and_the_run_stays_as_it_is(self, split: str, tmp_path: Path) -> None:
        fit(tmp_path / "run")
        before = self.snapshot(tmp_path / "run")
        changed = sources()
        getattr(changed, split).tensors["input"][0] += 1
        with pytest.raises(UserError, match=rf"the data \({split}\) is not the data that this run was started with"):
            fit(tmp_path / "run", data=changed, train__epochs=3)
        assert self.snapshot(tmp_path / "run") == before
        assert isoscale.Run(tmp_path / "run").status == "done"

    def test_a_role_that_is_gone_is_a_change_of_the_data(self, tmp_path: Path) -> None:
        fit(tmp_path / "run", train__epochs=1)
        with pytest.raises(UserError, match=r"the data \(val\) is not"):
            fit(tmp_path / "run", data=isoscale.Sources(train=rows(95)))

    def test_a_changed_recipe_is_refused_with_the_difference(self, tmp_path: Path) -> None:
        fit(tmp_path / "run")
        before = self.snapshot(tmp_path / "run")
        with pytest.raises(UserError, match=r"(?s)another recipe.*optimizer.lr: 0.01 → 0.02.*start a new run"):
            fit(tmp_path / "run", optimizer__lr=0.02)
        with pytest.raises(UserError, match=r"train.epochs: 2 → 1  \(a run can be made longer, not shorter\)"):
            fit(tmp_path / "run", train__epochs=1)
        assert self.snapshot(tmp_path / "run") == before

    def test_a_longer_training_ends_as_if_it_had_been_planned_so(self, tmp_path: Path) -> None:
        whole = fit(tmp_path / "whole", train__epochs=4)
        fit(tmp_path / "run", train__epochs=1)
        longer = fit(tmp_path / "run", train__epochs=4, observe__every=3, checkpoint__keep=5)
        assert first_step(longer) == 10
        assert sha(longer) == sha(whole)
        assert timeless(longer) == timeless(whole)

    def test_continuing_a_finished_run_says_so_and_changes_nothing(self, tmp_path: Path) -> None:
        earlier, task = Watched(), Watched()
        first = fit(tmp_path / "run", earlier)
        before, record = self.snapshot(tmp_path / "run"), first.record
        again = fit(tmp_path / "run", task)
        assert task.trained == earlier.trained
        after = self.snapshot(tmp_path / "run")
        assert after.keys() == before.keys()
        assert {name for name in before if after[name] != before[name]} <= {"run.json"}
        same = ("status", "step", "epoch", "best", "decided", "data", "seconds", "started")
        assert {key: again.record[key] for key in same} == {key: record[key] for key in same}
        log = (tmp_path / "run" / "log.txt").read_text()
        assert "continues the run in" in log and "this run is complete" in log

    def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning_and_the_end_is_the_same(
        self, tmp_path: Path
    ) -> None:
        whole = fit(tmp_path / "run", checkpoint__every="1 epoch", train__epochs=3)
        before = sha(whole), timeless(whole)
        newest = tmp_path / "run" / "checkpoints" / "step_00000030" / "model.safetensors"
        content = bytearray(newest.read_bytes())
        content[-1] ^= 1
        newest.write_bytes(bytes(content))
        again = fit(tmp_path / "run", checkpoint__every="1 epoch", train__epochs=3)
        assert first_step(again) == 20 and (sha(again), timeless(again)) == before
        assert "step_00000030 is damaged and passed over" in (tmp_path / "run" / "log.txt").read_text()
        assert equal_states(read(newest.parent), read(again.checkpoint("last")))

    def test_checkpoints_that_do_not_fit_the_task_are_refused(self, tmp_path: Path) -> None:
        fit(tmp_path / "run", train__epochs=1)
        other = Watched(nn.Sequential(nn.Linear(FEATURES, 9), nn.ReLU(), nn.Linear(9, 2)))
        with pytest.raises(UserError, match=r"model.0.bias is \(8,\), expected \(9,\)"):
            fit(tmp_path / "run", other)


def equal_states(one: Any, two: Any) -> bool:
    return one[1].keys() == two[1].keys() and all(
        torch.equal(tensor, two[0][part][name]) for part, group in one[0].items() for name, tensor in group.items()
    )


class Broken(Watched):
    """Fails in the stage that it is told."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.stage == "train" and batch_idx == 5:
            raise ZeroDivisionError("in training")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.stage == "val":
            raise ZeroDivisionError("in validation")
        return super().validation_step(batch, batch_idx)


class TestFailing:
    """What is left behind when something goes wrong."""

    @pytest.mark.parametrize(
        ("task", "data", "keys"),
        [
            (Broken("val"), None, {}),
            (nn.Linear(3, 3), None, {}),
            (None, "nonsense", {}),
            (None, None, {"train__precision": "tf32"}),
            (None, None, {"train__program": "graphed"}),
            (None, None, {"optimizer__momentum": 3}),
            (None, None, {"task__init_from": "nowhere"}),
            (None, None, {"parallel__reduce": "tree", "parallel__shards": 6}),
        ],
        ids=["validation", "no task", "no data", "precision", "program", "argument", "weights", "shards"],
    )
    def test_a_failure_before_the_first_step_leaves_nothing_behind(
        self, task: Any, data: Any, keys: dict[str, Any], tmp_path: Path
    ) -> None:
        with pytest.raises((UserError, ZeroDivisionError, ValueError)):
            fit(tmp_path / "run", task, data, **keys)
        assert not list(tmp_path.iterdir())

    def test_a_mistake_in_the_validation_shows_before_any_training(self, tmp_path: Path) -> None:
        task = Broken("val")
        with pytest.raises(ZeroDivisionError, match="in validation"):
            fit(tmp_path / "run", task)
        assert not task.trained

    def test_a_failure_in_training_is_recorded_and_what_was_saved_stays(self, tmp_path: Path) -> None:
        options = {"checkpoint__every": "2 steps"}
        with pytest.raises(ZeroDivisionError, match="in training"):
            fit(tmp_path / "run", Broken("train"), **options)
        run = isoscale.Run(tmp_path / "run")
        assert run.status == "failed" and "in training" in run.record["message"]
        assert run.checkpoint("last").name == "step_00000004"
        again = fit(tmp_path / "run", **options)
        assert first_step(again) == 4 and sha(again) == sha(fit(tmp_path / "whole", **options))

    def test_a_directory_with_other_things_in_it_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "thesis.tex").write_text("mine")
        with pytest.raises(UserError, match="is not empty and holds no run"):
            fit(tmp_path / "run")
        assert (tmp_path / "run" / "thesis.tex").read_text() == "mine"

    def test_a_file_where_the_run_should_go_is_a_clear_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        for path in (tmp_path / "file", tmp_path / "file" / "run"):
            with pytest.raises(UserError, match=r"file"):
                fit(path)
        assert (tmp_path / "file").read_text() == "mine"

    def test_checkpoints_that_cannot_be_written_end_the_training_with_what_to_do(self, tmp_path: Path) -> None:
        run = fit(tmp_path / "run", train__epochs=1)
        shutil.rmtree(run.path / "checkpoints")
        (run.path / "checkpoints").write_text("in the way")
        with pytest.raises(UserError, match="cannot save the checkpoint of step 10"):
            fit(tmp_path / "run")


def test_a_continued_run_keeps_the_origin_of_every_setting(tmp_path: Path) -> None:
    keys = {"observe.level": "error", "observe.tensorboard": 0}
    run = isoscale.train("images/digits", run=tmp_path / "run", **keys, **{"train.epochs": 1})
    before = (run.path / "recipe.yaml").read_text().splitlines()
    isoscale.train(None, run=tmp_path / "run", **{"train.epochs": 2})
    after = (run.path / "recipe.yaml").read_text().splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new and "# sealed" not in old]
    assert changed == [("  epochs: 1  # Python call", "  epochs: 2  # Python call")]
    assert any("images/digits.yaml" in line for line in after)


class Adapting(Watched):
    """Reads its data doubled, in double precision, and shows a root of a mean."""

    as_stored = frozenset(("input",))

    def adapt(self, data: Any, ranks: Any, say: Any) -> Any:
        assert (ranks.rank, ranks.world_size, ranks.all_gather(3, "a number")) == (0, 1, [3])
        say("doubled")
        return isoscale.Sources(train=self._doubled(data.train), val=self._doubled(data.val))

    def _doubled(self, source: Any) -> dict[str, Tensor]:
        return {**source.tensors, "input": source.tensors["input"].double() * 2}

    def fit_statistics(self, training: Any) -> None:
        assert len(training.source) == 95 and training.ranks.world_size == 1
        self.register_buffer("largest", training(95)["input"].abs().max())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert batch["input"].dtype == torch.float64
        number = batch["number"].float()
        self.log("number_rms", (number.square().sum(), len(number)), root=True)
        return super().training_step({**batch, "input": batch["input"].float()}, batch_idx)

    validation_step = training_step


class TestWhatATaskMakesOfItsData:
    def test_it_reads_it_in_its_own_form_and_measures_it(self, tmp_path: Path) -> None:
        run = fit(tmp_path / "run", Adapting())
        largest = 2 * float(rows(95)["input"].abs().max())
        weights = read_weights(run.checkpoint("last"))
        assert float(weights["largest"]) == pytest.approx(largest)
        assert "doubled" in (tmp_path / "run" / "log.txt").read_text()

    def test_a_root_is_that_of_the_mean_over_all_samples(self, tmp_path: Path) -> None:
        run = fit(tmp_path / "run", Adapting())
        of = {count: math.sqrt(sum(number**2 for number in range(count)) / count) for count in (95, 37)}
        assert run.metrics["train/number_rms_epoch"] == pytest.approx(of[95])
        assert run.metrics["val/number_rms"] == pytest.approx(of[37])


def test_a_step_that_cannot_be_compiled_says_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    def fails(*arguments: Any) -> None:
        raise BackendCompilerFailed("inductor", RuntimeError("no compiler was found"), None)

    monkeypatch.setattr(torch, "compile", lambda method, dynamic: fails)
    with pytest.raises(UserError, match=r"no compiler was found.*train\.program=auto"):
        fit(tmp_path / "run", train__program="compiled")


def test_a_learning_curve_is_seen_and_decides_nothing(tmp_path: Path) -> None:
    """It begins with an evaluation after the first step, which counts neither for patience nor as the best."""
    keys = {"train__epochs": 12, "optimizer__lr": 1e-12, "train__early_stopping": {"patience": 3, "min_delta": 1e-3}}
    plain, curved = (fit(tmp_path / str(name), observe__curve=name, **keys) for name in (None, "lcurve.out"))
    first = [line["step"] for line in timeless(curved) if line["name"] == "val/loss"]
    assert first[0] == 1 and first[1:] == [line["step"] for line in timeless(plain) if line["name"] == "val/loss"]
    assert plain.record["step"] == curved.record["step"] == 40
    assert plain.record["best"] == curved.record["best"] and sha(plain) == sha(curved)
