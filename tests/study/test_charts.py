import math
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from isoscale.study import charts
from isoscale.study.compare import compare
from tests.study.conftest import rows


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch):
    """The figures that were written."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments, **options):
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def test_every_run_has_its_colour_thin_in_training_and_thick_in_validation(make, drawn):
    for name, factor in (("a", 1.0), ("b", 2.0)):
        make(name, rows("train/loss_epoch", [3 * factor, 2 * factor]) + rows("val/loss", [2 * factor, factor]))
    assert charts.draw(compare(["a", "b"]), Path("c.png"))
    assert Path("c.png").read_bytes().startswith(b"\x89PNG")
    by_step, by_time = drawn[0].axes
    lines = by_step.get_lines()
    assert [list(line.get_xdata()) for line in lines] == [[10, 20]] * 4
    assert [list(line.get_xdata()) for line in by_time.get_lines()] == [[2, 4]] * 4
    assert lines[0].get_color() == lines[1].get_color() != lines[2].get_color() == lines[3].get_color()
    assert lines[0].get_linewidth() < lines[1].get_linewidth()


def test_the_monitored_metric_has_its_own_row_and_what_is_asked_for_replaces_all(make, drawn):
    for name in ("a", "b"):
        make(name, rows("val/loss", [2, 1]) + rows("val/accuracy", [0.1, 0.9]) + rows("lr", [1, 0]))
    charts.draw(compare(["a", "b"]), Path("c.png"))
    charts.draw(compare(["a", "b"], metrics=["lr"]), Path("c.svg"))
    labels = [[axes.get_ylabel() for axes in figure.axes] for figure in drawn]
    assert labels == [["loss", "loss", "accuracy", "accuracy"], ["lr", "lr"]]


@pytest.mark.parametrize(
    ("name", "values", "scale"),
    [("val/loss", [10, 0.1], "log"), ("val/loss", [2, 0.5], "linear"), ("val/loss", [10, 0.0], "linear"),
     ("val/accuracy", [0.01, 0.99], "linear")],
)  # fmt: skip
def test_only_a_loss_over_decades_has_a_logarithmic_axis(make, drawn, name, values, scale):
    make("a", rows(name, values)), make("b", rows(name, values))
    charts.draw(compare(["a", "b"], metrics=[name]), Path("c.pdf"))
    assert drawn[0].axes[0].get_yscale() == scale


def test_long_trainings_are_drawn_in_hours(make, drawn):
    for name in ("a", "b"):
        make(name, rows("val/loss", [2, 1], seconds=7200))
    charts.draw(compare(["a", "b"]), Path("c.png"))
    assert drawn[0].axes[1].get_xlabel() == "time of training (h)"
    assert list(drawn[0].axes[1].get_lines()[0].get_xdata()) == [2, 4]


def test_twenty_runs_are_told_apart_and_strange_names_are_drawn(make, drawn):
    names = ["_hidden", "no $\\formula$", *(f"run-{number}" for number in range(18))]
    for name in names:
        make(f"runs/{name}", rows("val/loss", [2, math.nan, 1]), [f"optimizer.lr=0.{len(name)}"])
    charts.draw(compare(["runs"]), Path("c.png"))
    lines = drawn[0].axes[0].get_lines()
    assert len({(line.get_color(), str(line._unscaled_dash_pattern)) for line in lines}) == 20
    legend = [entry.get_text() for entry in drawn[0].legends[0].get_texts()]
    assert len(legend) == 22 and any("_hidden, lr 0.7" in entry for entry in legend)


def test_without_values_there_is_no_picture(make):
    make("a", []), make("b", [])
    assert not charts.draw(compare(["a", "b"]), Path("c.png")) and not Path("c.png").exists()
