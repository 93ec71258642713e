"""What TensorBoard reads back: one chart a metric, one folder a stage, no step twice, and the figures as they are."""

import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PluginEventAccumulator
from tensorboard.compat.proto.graph_pb2 import GraphDef
from tensorboard.plugins.hparams.api_pb2 import STATUS_RUNNING, STATUS_SUCCESS
from tensorboard.plugins.hparams.metadata import parse_session_end_info_plugin_data as parse_end
from tensorboard.plugins.hparams.metadata import parse_session_start_info_plugin_data as parse_start
from tensorboard.util.tensor_util import make_ndarray
from torch import nn

from isoscale.engine.state.checkpoint import read_weights
from isoscale.observe.config import Observe
from isoscale.observe.events import Ended, EpochEnded, Event, FiguresMade, Logged, Note, Started
from isoscale.observe.figures import Detection, Figure, Histogram, Matrix, Network, Pictures, PrecisionRecall
from isoscale.observe.observers import Observers
from isoscale.observe.tensorboard.observer import TensorBoard
from tests.disks import PAGE, mounted
from tests.helpers import sha, timeless, train

PICTURES = Pictures(np.zeros((2, 8, 8, 3), np.uint8), ["cat 93 %", "dog 51 %"], [True, False])
MATRIX = Matrix(np.array([[3, 1], [0, 2]]), ["cat", "dog"])


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of every tag in the folder."""
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, pytest.approx(event.value)) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def write_epoch(board: TensorBoard, epoch: int, loss: float) -> None:
    step = 100 * epoch
    values = {"train/loss": loss, "lr": 0.001, "time/samples_per_second": 5.0}
    board.notify(Logged(step + 50, epoch, values))
    board.notify(EpochEnded(step + 100, epoch, {"train/loss_epoch": loss + 1, "val/loss": loss + 2}, seconds=1.0))


def test_train_and_validation_share_a_tag_and_have_a_folder_each(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.notify(Note("not a value"))
    write_epoch(board, 0, 0.5)
    board.close()
    assert scalars(tmp_path / "train") == {
        "loss": [(50, 0.5)],
        "lr": [(50, 0.001)],
        "time/samples_per_second": [(50, 5.0)],
    }
    assert scalars(tmp_path / "train_epoch") == {"loss": [(100, 1.5)]}
    assert scalars(tmp_path / "val") == {"loss": [(100, 2.5)]}


def test_metrics_with_tags_of_ones_own_are_in_one_folder_and_nowhere_else(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, tags={"train/loss_epoch": "Loss/train", "val/loss": "loss", "lr": "Learning Rate"})
    write_epoch(board, 0, 0.5)
    board.close()
    assert scalars(tmp_path / "tagged") == {
        "Learning Rate": [(50, 0.001)],
        "Loss/train": [(100, 1.5)],
        "loss": [(100, 2.5)],
    }
    assert scalars(tmp_path / "train") == {"loss": [(50, 0.5)], "time/samples_per_second": [(50, 5.0)]}
    assert {folder.name for folder in tmp_path.iterdir()} == {"tagged", "train"}


def test_a_tag_for_no_metric_is_said_at_the_end_of_a_whole_run(tmp_path: Path) -> None:
    said: list[str] = []
    for purge_step, status in ((1, "done"), (1, "stopped"), (51, "done")):
        board = TensorBoard(tmp_path, purge_step, note=lambda text, level: said.append(text), tags={"val/los": "Loss"})
        write_epoch(board, 0, 0.5)
        board.notify(Ended(status, 100))  # type: ignore[arg-type]
        board.close()
    logged = "lr, time/samples_per_second, train/loss, train/loss_epoch, val/loss"
    assert said == [f"observe.tensorboard_tags: no metric is called val/los; logged are {logged}"]


@pytest.mark.parametrize(("tags", "words"), [({"a": "x", "b": "x"}, "two metrics would be 'x'"), ({"a": ""}, "empty")])
def test_tags_must_be_told_apart(tags: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Observe(tensorboard_tags=tags)


def test_values_can_be_read_before_the_writer_is_closed(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    write_epoch(board, 0, 0.5)
    assert scalars(tmp_path / "val") == {"loss": [(100, 2.5)]}
    board.close()


def test_a_continued_run_has_no_step_twice(tmp_path: Path) -> None:
    killed = TensorBoard(tmp_path)
    for epoch in range(3):
        write_epoch(killed, epoch, 0.5)
    killed.close()
    continued = TensorBoard(tmp_path, purge_step=101)
    write_epoch(continued, 1, 0.7)
    continued.close()
    assert scalars(tmp_path / "train")["loss"] == [(50, 0.5), (150, 0.7)]
    assert scalars(tmp_path / "val")["loss"] == [(100, 2.5), (200, 2.7)]


def test_a_continued_run_drops_later_values_of_every_stage_at_once(tmp_path: Path) -> None:
    killed = TensorBoard(tmp_path)
    for epoch in range(2):
        write_epoch(killed, epoch, 0.5)
    killed.close()
    TensorBoard(tmp_path, purge_step=101).close()
    assert scalars(tmp_path / "val")["loss"] == [(100, 2.5)]


class Told:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def notify(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        """Nothing is open."""


def test_a_folder_that_cannot_be_made_costs_tensorboard_and_no_other_observer(tmp_path: Path) -> None:
    board, told, logged = TensorBoard(tmp_path / "file" / "tensorboard"), Told(), Logged(50, 0, {"train/loss": 0.5})
    (tmp_path / "file").write_text("in the way")
    observers = Observers([board, told])
    for _ in range(2):
        observers.notify(logged)
    words = "TensorBoard failed and is switched off, training goes on: Not a directory"
    note, *rest = told.events
    assert isinstance(note, Note) and note.level == "warning" and note.text.startswith(words)
    assert rest == [logged, logged]


EPOCH = {"train__epochs": 1, "data__subset": 300, "schedule": {"name": "constant"}, "observe__every": 1}
LONGER = {**EPOCH, "train__epochs": 15}


@pytest.mark.slow
def test_a_full_disk_costs_tensorboard_and_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = train(tmp_path / "whole", **LONGER)
    run = train(tmp_path / "run", **EPOCH, observe__tensorboard=1)
    with mounted(tmp_path / "disk") as disk:
        disk.take(run.tensorboard)
        disk.leave(3 * PAGE)  # three files can be begun, of which the one for every step is full first
        capsys.readouterr()
        train(run.path, **LONGER, observe__tensorboard=1, observe__level="warning")
        words = "TensorBoard failed and is switched off, training goes on: No space left on device"
        assert capsys.readouterr().out.count(words) == 1
        assert (run.path / "log.txt").read_text().count(words) == 1
        shown = [step for step, _ in scalars(run.tensorboard / "train")["loss"]]
        assert shown == list(range(1, len(shown) + 1)) and 8 < len(shown) < 75, "all until then can be read"
    assert (run.status, run.record["step"]) == ("done", 75)
    assert sha(run) == sha(whole) and timeless(run) == timeless(whole)
    wanted = read_weights(whole.checkpoint("last"))
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in read_weights(run.checkpoint("last")).items())


def show(board: TensorBoard, step: int = 100, **figures: Figure) -> None:
    """Send figures; names are written with double underscores for slashes."""
    board.notify(FiguresMade(step, 0, {name.replace("__", "/"): figure for name, figure in figures.items()}))


def read(folder: Path) -> EventAccumulator:
    """Everything in the folder."""
    return EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0}).Reload()


def tensor(folder: Path, tag: str) -> np.ndarray:
    """The only value of a tag."""
    (event,) = read(folder).Tensors(tag)
    return make_ndarray(event.tensor_proto)


def test_at_level_1_there_is_nothing_but_scalars(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.notify(Started("digits", "a", [], 0, 200, 100, {"optimizer.lr": 0.1}))
    show(board, val__confusion=MATRIX)
    write_epoch(board, 0, 0.5)
    board.notify(Ended("done", 200, values={"val/loss": 2.5}))
    board.close()
    assert {folder.name for folder in tmp_path.iterdir()} == {"train", "train_epoch", "val"}
    assert read(tmp_path / "val").Tags()["images"] == []


def test_pictures_and_figures_are_images_in_the_folder_of_their_stage(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, level=2)
    show(board, val__confusion=MATRIX, val__predictions=PICTURES, train__inputs=PICTURES)
    # The board is not closed: what is shown is on disk at once.
    assert read(tmp_path / "val").Tags()["images"] == ["confusion", "predictions"]
    (image,) = read(tmp_path / "train").Images("inputs")
    dots = imread(BytesIO(image.encoded_image_string))
    assert image.step == 100 and dots.shape[:2] == (image.height, image.width)
    board.close()


def counted(scores: np.ndarray, positive: np.ndarray) -> Detection:
    thresholds = np.unique(scores)[::-1]
    true = np.array([np.sum(positive & (scores >= threshold)) for threshold in thresholds], int)
    false = np.array([np.sum(~positive & (scores >= threshold)) for threshold in thresholds], int)
    return Detection(thresholds, true, false, int(positive.sum()), int((~positive).sum()))


@pytest.mark.parametrize("share", [0.3, 0.0, 1.0])
def test_precision_and_recall_agree_with_counting_by_hand(tmp_path: Path, share: float) -> None:
    random = np.random.default_rng(0)
    scores = random.random(500).round(3)  # some are thresholds of the plugin, and some occur twice
    scores[:3] = 0, 0.5, 1
    positive = random.random(500) < share
    board = TensorBoard(tmp_path, level=2)
    show(board, val__precision_recall=PrecisionRecall({"cat": counted(scores, positive)}))
    board.close()
    rows = tensor(tmp_path / "val", "precision_recall/cat")
    assert rows.shape == (6, 201)
    for column, threshold in zip(rows.T, np.linspace(0, 1, 201), strict=True):
        found = scores >= threshold
        true, false = np.sum(found & positive), np.sum(found & ~positive)
        missed = np.sum(~found & positive)
        precision = true / max(true + false, 1)
        recall = true / positive.sum() if positive.any() else 1
        np.testing.assert_allclose(column, [true, false, np.sum(~found & ~positive), missed, precision, recall])


def test_the_plugin_for_precision_and_recall_can_read_it_and_there_is_a_figure(tmp_path: Path) -> None:
    from tensorboard.plugins.pr_curve.metadata import parse_plugin_metadata

    cat = counted(np.array([0.1, 0.9]), np.array([False, True]))
    board = TensorBoard(tmp_path, level=2)
    show(board, val__precision_recall=PrecisionRecall({"cat": cat, "dog": cat}))
    board.close()
    events = read(tmp_path / "val")
    assert events.Tags()["images"] == ["precision_recall"]
    assert set(events.PluginTagToContent("pr_curves")) == {"precision_recall/cat", "precision_recall/dog"}
    assert parse_plugin_metadata(events.PluginTagToContent("pr_curves")["precision_recall/cat"]).num_thresholds == 201


def test_scores_that_are_no_probabilities_have_a_figure_only(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, level=2)
    show(board, val__precision_recall=PrecisionRecall({"cat": counted(np.array([-3.0, 7.0]), np.array([False, True]))}))
    board.close()
    tags = read(tmp_path / "val").Tags()
    assert (tags["images"], tags["tensors"]) == (["precision_recall"], [])


def test_a_histogram_keeps_its_counts_and_edges(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, level=2)
    show(board, gradients__weight=Histogram(np.array([1.0, 5.0]), np.array([-1.0, 0.0, 3.0])))
    board.close()
    np.testing.assert_array_equal(tensor(tmp_path / "train", "gradients/weight"), [[-1, 0, 1], [0, 3, 5]])
    assert set(read(tmp_path / "train").PluginTagToContent("histograms")) == {"gradients/weight"}


def test_a_continued_run_drops_pictures_and_curves_that_are_made_again(tmp_path: Path) -> None:
    figures = {
        "val__confusion": MATRIX,
        "val__curve": PrecisionRecall({"cat": counted(np.array([0.1, 0.9]), np.array([False, True]))}),
        "val__outputs": Histogram(np.array([1.0]), np.array([0.0, 1.0])),
    }
    killed = TensorBoard(tmp_path, 1, level=2)
    for step in (100, 200):
        show(killed, step, **figures)
    killed.close()
    TensorBoard(tmp_path, 101, level=2).close()
    events = PluginEventAccumulator(str(tmp_path / "val")).Reload()  # the page's own reader, of which all are tensors
    steps = {tag: [event.step for event in events.Tensors(tag)] for tag in ("confusion", "curve/cat", "outputs")}
    assert steps == {"confusion": [100], "curve/cat": [100], "outputs": [100]}


def session(folder: Path) -> dict[str, Any]:
    """The settings of the only session in the folder."""
    values = parse_start(read(folder).PluginTagToContent("hparams")["_hparams_/session_start_info"]).hparams
    return {key: getattr(value, value.WhichOneof("kind")) for key, value in values.items()}


SETTINGS = {
    "optimizer.lr": 0.1, "train.epochs": 3, "data.shuffle": True, "optimizer.name": "adam", "train.clip": None,
    "task.model.widths": [64, 10], "task.bad": float("nan"), "data.split": {"val": 0.1},
    "observe.every": 50, "checkpoint.keep": 2, "launch.nodes": 1,
}  # fmt: skip


def test_settings_keep_their_types_and_stand_beside_the_final_metrics(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, level=2)
    board.notify(Started("digits", "a", [], 0, 200, 100, SETTINGS))
    board.notify(Ended("done", 200, values={"val/loss": 0.25, "val/accuracy": 0.5, "best/val/accuracy": 0.75}))
    board.close()
    found = session(tmp_path / "final")
    assert found == {
        "optimizer.lr": 0.1, "train.epochs": 3, "data.shuffle": True, "optimizer.name": "adam",
        "task.model.widths": "[64, 10]", "task.bad": "NaN", "data.split": '{"val": 0.1}',
    }  # fmt: skip
    assert found["data.shuffle"] is True
    assert scalars(tmp_path / "final") == {
        "loss": [(200, 0.25)],
        "accuracy": [(200, 0.5)],
        "accuracy/best": [(200, 0.75)],
    }


def test_a_continued_run_has_the_settings_and_the_end_of_its_last_start(tmp_path: Path) -> None:
    for epochs, status in ((3, "stopped"), (6, "done")):
        board = TensorBoard(tmp_path, 1, level=2)
        board.notify(Started("digits", "a", [], 0, 200, 100, {"train.epochs": epochs}))
        board.notify(Ended(status, 100 * epochs, values={"val/loss": 1 / epochs}))
        board.close()
        assert session(tmp_path / "final") == {"train.epochs": epochs}
        assert scalars(tmp_path / "final") == {"loss": [(100 * epochs, 1 / epochs)]}
        ended = parse_end(read(tmp_path / "final").PluginTagToContent("hparams")["_hparams_/session_end_info"])
        assert ended.status == (STATUS_RUNNING if status == "stopped" else STATUS_SUCCESS)


class Frozen(nn.Module):
    """A network of which one layer is never in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(4, 3), nn.Dropout(0.5)
        self.drop.eval()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.drop(self.first(rows[: int(rows.shape[0])]))


def test_the_graph_of_a_network_has_its_layers_and_leaves_it_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    network = Frozen()
    board = TensorBoard(tmp_path, level=2)
    show(board, model=Network(network, torch.zeros(2, 4)))
    board.close()
    graph = read(tmp_path / "train").Graph()
    assert isinstance(graph, GraphDef) and any("Linear[first]" in node.name for node in graph.node)
    assert (network.training, network.first.training, network.drop.training) == (True, True, False)
    assert capfd.readouterr() == ("", "") and not recwarn.list


class Untraceable(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("only at home\nand a second line")


def test_a_network_that_cannot_be_traced_costs_one_line_for_those_who_look_closely(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    notes: list[tuple[str, str]] = []
    board = TensorBoard(tmp_path, level=2, note=lambda text, level: notes.append((level, text)))
    show(board, model=Network(Untraceable(), torch.zeros(2, 4)), val__confusion=MATRIX)
    board.close()
    assert notes == [("debug", "TensorBoard gets no graph of Untraceable: only at home")]
    assert capfd.readouterr() == ("", "")
    assert read(tmp_path / "val").Tags()["images"] == ["confusion"]


def test_the_module_imports_neither_torch_nor_tensorboard() -> None:
    code = "import isoscale.observe.tensorboard.observer, sys; assert not {'torch', 'tensorboard'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
