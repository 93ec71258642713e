"""What TensorBoard reads back: one chart a metric, one folder a stage, no step twice."""

import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from isoscale.observe.events import EpochEnded, Logged, Note
from isoscale.observe.observers import Observers
from isoscale.observe.tensorboard import TensorBoard


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


def test_a_full_disk_costs_tensorboard_and_not_the_run(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path / "file" / "tensorboard")
    (tmp_path / "file").write_text("in the way")
    Observers([board]).notify(Logged(50, 0, {"train/loss": 0.5}))


def test_the_module_imports_neither_torch_nor_tensorboard() -> None:
    code = "import isoscale.observe.tensorboard, sys; assert not {'torch', 'tensorboard'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
