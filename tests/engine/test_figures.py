"""What a training tells besides losses: layers, figures, tallies, where time went."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

import isoscale
from isoscale.data.sources import Source
from isoscale.engine import figures as show
from isoscale.engine.diagnose.layers import look_at
from isoscale.engine.state.checkpoint import read_weights
from isoscale.engine.task import Tally, Task
from isoscale.errors import UserError
from isoscale.observe.events import FiguresMade
from isoscale.observe.figures import Figure, Histogram, Matrix, Network, Pictures
from isoscale.observe.tables import layer_lines, visible_layers
from isoscale.observe.tensorboard import observer as tensorboard
from isoscale.runs.inference import figures
from tests.helpers import QUIET, sha, timeless, train


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[FiguresMade]:
    """Everything that a training at level 2 shows."""
    events: list[FiguresMade] = []
    notify = tensorboard.TensorBoard.notify

    def listen(self: Any, event: Any) -> None:
        if isinstance(event, FiguresMade):
            events.append(event)
        notify(self, event)

    monkeypatch.setattr(tensorboard.TensorBoard, "notify", listen)
    return events


class TestFigures:
    @pytest.mark.slow
    def test_a_training_shows_inputs_model_results_and_distributions(
        self, shown: list[FiguresMade], tmp_path: Path
    ) -> None:
        train(tmp_path / "run", train__epochs=2, observe__tensorboard=2)
        start, *evaluations = shown
        assert start.step == 0 and set(start.figures) == {"train/inputs", "model"}
        assert isinstance(start.figures["train/inputs"], Pictures)
        assert isinstance(start.figures["model"], Network)
        assert [event.step for event in evaluations] == [23, 46]
        names = set(evaluations[0].figures)
        assert {"val/confusion", "val/precision_recall", "val/predictions"} < names
        assert {"parameters/model.layers.0.weight", "gradients/model.layers.0.weight"} < names
        matrix = evaluations[-1].figures["val/confusion"]
        assert isinstance(matrix, Matrix) and matrix.counts.sum() == 179

    @pytest.mark.slow
    def test_they_change_nothing(self, tmp_path: Path) -> None:
        plain = train(tmp_path / "plain", train__epochs=2)
        looked_at = train(tmp_path / "shown", train__epochs=2, observe__tensorboard=2)
        assert sha(plain) == sha(looked_at) and timeless(plain) == timeless(looked_at)

    def test_results_are_those_of_the_averaged_weights(self, shown: list[FiguresMade], tmp_path: Path) -> None:
        run = train(tmp_path / "run", train__epochs=1, observe__tensorboard=2, train__ema=0.99, schedule__warmup=0)
        matrix = shown[-1].figures["val/confusion"]
        assert isinstance(matrix, Matrix)
        source = run.data().val
        batch, found = source.fetch(torch.arange(len(source))), []
        for average in (True, False):
            model = run.model()
            weights = read_weights(run.checkpoint("last"), average)
            model.load_state_dict({name.removeprefix("model."): tensor for name, tensor in weights.items()})
            right = model(batch["input"].flatten(1) / 16).argmax(1) == batch["target"]
            found.append(float(right.double().mean()))
        averaged, trained = found
        assert abs(averaged - trained) > 0.1
        assert matrix.counts.trace() / matrix.counts.sum() == pytest.approx(averaged)
        assert run.metrics["val/accuracy"] == pytest.approx(averaged)

    def test_a_best_value_of_zero_is_shown_beside_the_settings(self, tmp_path: Path) -> None:
        data = {"input": torch.zeros(8, 2), "target": torch.zeros(8, 1)}
        recipe = {"data": {"batch_size": 4}, "train": {"epochs": 1}}
        keys = {"observe.level": "error", "observe.tensorboard": 2}
        task = isoscale.Supervised(nn.Linear(2, 1, bias=False))
        run = isoscale.Trainer(recipe, run=tmp_path / "run", **keys).fit(task, isoscale.Sources(train=data, val=data))
        assert run.record["best"] == {"name": "val/loss", "value": 0.0, "step": 2}
        events = EventAccumulator(str(run.tensorboard / "final")).Reload()
        assert [event.value for event in events.Scalars("loss/best")] == [0.0]

    def test_gradients_are_those_of_the_last_step(self, shown: list[FiguresMade], tmp_path: Path) -> None:
        model = nn.Linear(3, 1, bias=False)
        data = {"input": torch.eye(3), "target": torch.ones(3, 1)}
        start = model.weight.detach().clone()
        recipe = {"data": {"batch_size": 3}, "train": {"steps": 1}, "optimizer": {"name": "sgd", "lr": 1e-9}}
        sources = isoscale.Sources(train=data, val=data)
        keys = {"observe.level": "error", "observe.tensorboard": 2}
        isoscale.Trainer(recipe, run=tmp_path / "run", **keys).fit(isoscale.Supervised(model), sources)
        found = shown[-1].figures["gradients/model.weight"]
        expected = (2 / 3 * (start - 1)).flatten()
        assert isinstance(found, Histogram) and found.counts.sum() == 3
        assert found.edges[0] == pytest.approx(float(expected.min()), rel=1e-4)
        assert found.edges[-1] == pytest.approx(float(expected.max()), rel=1e-4)

    def test_a_task_that_shows_nothing_costs_nothing(self, tmp_path: Path) -> None:
        class Silent(isoscale.Supervised):
            def predict_step(self, batch: Any, batch_idx: int) -> Any:
                raise AssertionError("nobody asked")

        data = {"input": torch.randn(8, 2), "target": torch.randn(8, 1)}
        run = isoscale.Trainer({"data": {"batch_size": 4}, "train": {"steps": 2}}, run=tmp_path / "r", **QUIET).fit(
            Silent(nn.Linear(2, 1)), isoscale.Sources(train=data, val=data)
        )
        assert figures(isoscale.Run(run.path, Silent(nn.Linear(2, 1)), isoscale.Sources(val=data))) == {}

    def test_histograms_count_finite_values_only(self) -> None:
        module = nn.Linear(2, 2)
        module.weight.data = torch.tensor([[math.nan, math.inf], [1.0, 2.0]])
        module.bias.data = torch.full((2,), 3.0)
        found = show.distributions(module)
        weight, bias = found["parameters/weight"], found["parameters/bias"]
        assert isinstance(weight, Histogram) and isinstance(bias, Histogram)
        assert weight.counts.sum() == 2 and (weight.edges[0], weight.edges[-1]) == (1.0, 2.0)
        assert bias.counts.sum() == 2 and (np.diff(bias.edges) > 0).all()
        module.weight.data.fill_(math.nan)
        assert "parameters/weight" not in show.distributions(module)


class Counting(Task):
    """Logs a tally of how many samples it saw."""

    def __init__(self, everywhere: bool = False) -> None:
        super().__init__()
        self.model = nn.Linear(2, 1)
        self.everywhere = everywhere

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.everywhere:
            self.log("seen", self._tally(batch))
        return self.model(batch["input"]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("seen", self._tally(batch))
        return self.model(batch["input"]).square().mean()

    def _tally(self, batch: Any) -> Tally:
        return Tally(torch.tensor([len(batch["input"]), 1]), lambda total: {"samples": total[0], "batches": total[1]})


class TestTally:
    DATA = isoscale.Sources(train={"input": torch.randn(20, 2)}, val={"input": torch.randn(10, 2)})
    RECIPE = {"data": {"batch_size": 4}, "train": {"epochs": 3}}

    def test_it_adds_up_over_an_evaluation_and_starts_anew_in_the_next(self, tmp_path: Path) -> None:
        run = isoscale.Trainer(self.RECIPE, run=tmp_path / "run", **QUIET).fit(Counting(), self.DATA)
        assert run.history("val/samples") == [(5, 10), (10, 10), (15, 10)]
        assert run.history("val/batches") == [(5, 3), (10, 3), (15, 3)]

    def test_it_has_no_place_in_training(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"log\('seen'\): a tally belongs into validation_step"):
            isoscale.Trainer(self.RECIPE, run=tmp_path / "run", **QUIET).fit(Counting(everywhere=True), self.DATA)


class Scaled(nn.Module):
    """A model with a scale that is measured on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("scale", torch.zeros(2))
        self.measured = 0

    def fit_statistics(self, sample: Callable[[int], Tensor]) -> None:
        self.measured += 1
        self.scale.copy_(sample(1000).std(0))  # type: ignore[operator]

    def forward(self, rows: Tensor) -> Tensor:
        return self.layer(rows / self.scale)


class TestMeasuring:
    DATA = {"input": torch.randn(50, 2) * torch.tensor([1.0, 9.0]), "target": torch.randn(50, 1)}
    RECIPE: dict[str, Any] = {"data": {"batch_size": 10, "transforms": [{"class": "divide", "by": 2}]}}

    def fit(self, path: Path, steps: int, model: Scaled, **more: Any) -> isoscale.Run:
        keys = {**QUIET, "train.steps": steps, "train.epochs": None, "checkpoint.every": "2 steps", **more}
        return isoscale.Trainer(self.RECIPE, run=path, **keys).fit(isoscale.Supervised(model), self.DATA)

    def test_a_model_measures_transformed_samples_once(self, tmp_path: Path) -> None:
        model = Scaled()
        self.fit(tmp_path / "run", 3, model)
        torch.testing.assert_close(model.scale, (self.DATA["input"] / 2).std(0))
        assert model.measured == 1

    def test_a_continued_run_keeps_what_was_measured(self, tmp_path: Path) -> None:
        self.fit(tmp_path / "run", 2, Scaled())
        again = Scaled()
        run = self.fit(tmp_path / "run", 4, again)
        assert again.measured == 0
        torch.manual_seed(0)
        whole = self.fit(tmp_path / "whole", 4, Scaled())
        assert run.status == whole.status == "done"
        torch.testing.assert_close(again.scale, (self.DATA["input"] / 2).std(0))

    def test_weights_of_another_run_win_over_what_was_measured(self, tmp_path: Path) -> None:
        other = Scaled()
        self.fit(tmp_path / "first", 2, other)
        other_data = {"input": self.DATA["input"] * 100, "target": self.DATA["target"]}
        model = Scaled()
        keys = {**QUIET, "train.steps": 1, "task.init_from": str(tmp_path / "first")}
        isoscale.Trainer(self.RECIPE, run=tmp_path / "second", **keys).fit(isoscale.Supervised(model), other_data)
        torch.testing.assert_close(model.scale, other.scale)


class TestLayers:
    def model(self) -> nn.Module:
        head = nn.Linear(8, 2)
        head.requires_grad_(False)
        return nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), nn.ReLU(), head)

    def test_the_table_knows_parameters_sizes_and_shapes(self) -> None:
        module = self.model()
        layers = {layer.name: layer for layer in look_at(module, lambda: module(torch.randn(2, 4))).layers}
        assert layers[""].num_parameters == 40 + 16 + 18 and layers[""].num_trainable == 56
        assert layers["0.1"].num_bytes == 16 * 4 + (8 + 8) * 4 + 8  # statistics and their counter
        assert layers["0.0"].shape == (2, 8) and layers[""].shape == (2, 2)
        assert (layers["0.0"].kind, layers["0.0"].depth, layers[""].depth) == ("Linear", 2, 0)

    def test_looking_leaves_no_trace(self) -> None:
        module = self.model().train()
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        look_at(module, lambda: module(torch.randn(2, 4)))
        assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
        assert all(part.training and not part._forward_hooks for part in module.modules())

    def test_a_model_that_cannot_be_run_has_a_table_without_shapes(self) -> None:
        def fail() -> None:
            raise RuntimeError("no")

        model = look_at(self.model(), fail)
        assert len(model.layers) == 6 and all(layer.shape is None for layer in model.layers)
        assert model.network() is None

    def test_the_lines_go_as_deep_as_there_is_room(self) -> None:
        layers = look_at(self.model(), None).layers
        assert [layer.name for layer in visible_layers(layers, 12)] == ["0.0", "0.1", "2"]
        assert [layer.name for layer in visible_layers(layers, 2)] == ["0", "2"]
        assert "18 of the parameters are not trained" in layer_lines(layers)[-1]
        assert sum(layer.num_parameters for layer in visible_layers(layers, 12)) == layers[0].num_parameters

    def test_parameters_beside_layers_have_a_line_and_rows_add_up(self) -> None:
        class Scaled(nn.Sequential):
            def __init__(self) -> None:
                super().__init__(nn.Linear(4, 8), nn.Linear(8, 1))
                self.scale = nn.Parameter(torch.ones(3))

        layers = look_at(nn.Sequential(Scaled(), nn.Linear(1, 1)), None).layers
        shown = {layer.name: layer.num_parameters for layer in visible_layers(layers, 12)}
        assert shown == {"0": 3, "0.0": 40, "0.1": 9, "1": 2}
        assert sum(shown.values()) == layers[0].num_parameters
        assert "output" not in layer_lines(layers)[0]

    def test_a_run_keeps_its_table(self, tmp_path: Path) -> None:
        run = train(tmp_path / "run", train__epochs=1)
        rows = {layer["name"]: layer for layer in run.record["layers"]}
        assert rows["layers.0"]["num_parameters"] == 64 * 256 + 256
        assert rows["layers.0"]["shape"] == [2, 256]


class TestProfile:
    def test_it_counts_every_step_and_adds_up_to_the_whole(self, tmp_path: Path) -> None:
        run = isoscale.train("images/digits", run=tmp_path / "run", profile=True, **QUIET, **{"train.epochs": 3})
        actions = {action["name"]: action for action in run.record["profile"]}
        assert [actions[name]["calls"] for name in ("data", "forward", "backward", "optimizer")] == [69] * 4
        assert actions["evaluation"]["calls"] == 3 and actions["saving"]["calls"] == 3
        total = actions.pop("total")["seconds"]
        assert sum(action["seconds"] for action in actions.values()) == pytest.approx(total, rel=1e-6)
        assert all(action["seconds"] > 0 for action in actions.values())

    def test_it_changes_nothing_and_writes_a_trace(self, tmp_path: Path) -> None:
        plain = train(tmp_path / "plain", train__epochs=3)
        profiled = isoscale.train("images/digits", run=tmp_path / "run", profile=True, **QUIET, **{"train.epochs": 3})
        assert sha(plain) == sha(profiled) and timeless(plain) == timeless(profiled)
        trace = json.loads((tmp_path / "run" / "profile" / "trace.json").read_text())
        assert any("addmm" in event.get("name", "") for event in trace["traceEvents"])

    @pytest.mark.parametrize("section", [{"train.accumulate": 2}, {"parallel.reduce": "tree"}])
    def test_it_sees_the_parts_of_a_step(self, section: dict[str, Any], tmp_path: Path) -> None:
        keys = {**QUIET, **section, "train.epochs": 1}
        run = isoscale.train("images/digits", run=tmp_path / "run", profile=True, **keys)
        actions = {action["name"]: action["calls"] for action in run.record["profile"]}
        assert actions["reduce"] == actions["optimizer"] == 23
        assert actions["forward"] == actions["backward"] > 23


def test_training_time_is_logged_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    train(tmp_path / "run", train__epochs=2)
    run = train(tmp_path / "run", train__epochs=4)
    seconds = [value for _, value in run.history("time/seconds")]
    assert seconds == sorted(seconds) and len(seconds) >= 8
    assert seconds[-1] == pytest.approx(run.record["seconds"], abs=0.5)


def test_a_source_and_outputs_reach_the_task_in_its_order(tmp_path: Path) -> None:
    class Telling(isoscale.Supervised):
        def show_results(self, source: Source, outputs: dict[str, Tensor]) -> dict[str, Figure]:
            rows = source.fetch(torch.arange(len(source)))["input"]
            torch.testing.assert_close(outputs["prediction"], self.model(rows).detach())
            return {"table": Matrix(np.zeros((1, 1), dtype=np.int64), ["a"])}

    data = {"input": torch.randn(11, 2), "target": torch.randn(11, 1)}
    sources = isoscale.Sources(train=data, val=data)
    run = isoscale.Trainer({"data": {"batch_size": 4}, "train": {"steps": 2}}, run=tmp_path / "r", **QUIET).fit(
        Telling(nn.Linear(2, 1)), sources
    )
    assert list(figures(run)) == ["table"]
