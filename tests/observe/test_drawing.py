"""Drawing figures: what is drawn is what was counted."""

import subprocess
import sys
from io import BytesIO
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.image import imread

from isoscale.observe.drawing import draw
from isoscale.observe.figures import (
    Band,
    Bands,
    Curves,
    Detection,
    Histogram,
    JointHistograms,
    Matrix,
    Parity,
    ParityPoints,
    Pictures,
    PrecisionRecall,
    Slices,
)
from isoscale.observe.style import NEUTRAL, RIGHT, WRONG, png

RANDOM = np.random.default_rng(0)


def painted(figure: Figure) -> np.ndarray:
    """The figure's dots, as bytes."""
    return (imread(BytesIO(png(figure)))[..., :3] * 255).round().astype(np.uint8)


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def as_bytes(colour: str) -> list[int]:
    return [round(255 * part) for part in to_rgb(colour)]


def is_inside(small: np.ndarray, large: np.ndarray) -> bool:
    """Whether an image is part of another one, dot for dot."""
    height, width = small.shape[:2]
    windows = np.lib.stride_tricks.sliding_window_view(large, (height, width), axis=(0, 1))
    found = (windows[:, :, :, 0, :] == small[0].T).all((2, 3))
    return any(
        np.array_equal(large[row : row + height, column : column + width], small)
        for row, column in np.argwhere(found)
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 8, 8, 3), (3, 8, 8, 1), (3, 8, 8), (3, 5, 20, 3)])
def test_every_pixel_of_a_small_picture_is_a_sharp_square(shape: tuple[int, ...]) -> None:
    pixels = RANDOM.integers(0, 256, shape, dtype=np.uint8)
    dots = painted(draw("val/predictions", Pictures(pixels)))
    factor = 96 // max(shape[1:3])
    for picture in np.broadcast_to(pixels.reshape(*shape[:3], -1), (*shape[:3], 3)):
        assert is_inside(picture.repeat(factor, 0).repeat(factor, 1), dots)


def test_a_large_picture_is_averaged() -> None:
    pixels = np.zeros((1, 600, 300, 3), np.uint8)
    pixels[:, ::3, :, 0] = 90
    dots = painted(draw("val/predictions", Pictures(pixels)))
    assert is_inside(np.full((200, 100, 3), (30, 0, 0), np.uint8), dots)
    assert dots.shape[0] < 300


def test_frames_and_captions_say_which_predictions_are_right() -> None:
    pixels = np.zeros((2, 8, 8, 3), np.uint8)
    figure = draw("val/predictions", Pictures(pixels, ["cat 93 %", "dog 51 %"], [True, False]))
    left, right = np.split(painted(figure), 2, axis=1)
    assert (left == as_bytes(RIGHT)).all(2).sum() > 1000 > 0 == (left == as_bytes(WRONG)).all(2).sum()
    assert (right == as_bytes(WRONG)).all(2).sum() > 1000 > 0 == (right == as_bytes(RIGHT)).all(2).sum()
    assert texts(figure) == ["val/predictions", "cat 93 %", "dog 51 %"]


def test_pictures_without_predictions_have_neutral_frames() -> None:
    dots = painted(draw("train/inputs", Pictures(np.zeros((2, 8, 8, 3), np.uint8))))
    assert (dots == as_bytes(NEUTRAL)).all(2).sum() > 1000


def test_no_pictures_give_an_empty_figure() -> None:
    assert texts(draw("train/inputs", Pictures(np.zeros((0, 8, 8, 3), np.uint8)))) == ["train/inputs"]


def test_a_long_caption_goes_on_in_a_second_line() -> None:
    figure = draw("a", Pictures(np.zeros((1, 8, 8, 3), np.uint8), ["American black bear 93 %, is a polar bear"]))
    assert texts(figure)[1] == "American black\nbear 93 %, is a…"


def test_a_matrix_shows_counts_as_numbers_and_shares_of_the_row_as_colour() -> None:
    counts = np.array([[8, 2, 0], [0, 1, 0], [0, 0, 0]])
    figure = draw("val/confusion", Matrix(counts, ["cat", "dog", "cow"]))
    axes = figure.axes[0]
    np.testing.assert_allclose(axes.images[0].get_array(), [[0.8, 0.2, 0], [0, 1, 0], [0, 0, 0]])
    assert {(*text.get_position(), text.get_text()) for text in axes.texts} == {(0, 0, "8"), (1, 0, "2"), (1, 1, "1")}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog", "cow"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted class", "true class")


def test_of_a_large_matrix_the_largest_numbers_are_written_and_ties_are_treated_alike() -> None:
    counts = np.ones((100, 100), int)
    counts[3, 7], counts[8, 8] = 5, 90
    figure = draw("val/confusion", Matrix(counts, [f"class {number}" for number in range(100)]))
    assert sorted(texts(figure)) == ["5", "90"]
    assert len(figure.axes[0].get_xticklabels()) == 100


@pytest.mark.parametrize("number", [1, 2, 10, 100, 1000])
@pytest.mark.slow
def test_class_names_do_not_overlap_and_nothing_sticks_out(number: int) -> None:
    figure = draw(
        "val/confusion", Matrix(np.eye(number, dtype=int) * 123456, ["a_very_long_$name$_of_a_class"] * number)
    )
    figure.draw_without_rendering()
    axes = figure.axes[0]
    boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
    assert all(upper.y0 >= lower.y1 - 1 for upper, lower in pairwise(boxes))
    whole = figure.get_tightbbox()
    width, height = figure.get_size_inches()
    assert whole.x0 >= 0 and whole.y0 >= 0 and whole.x1 <= width and whole.y1 <= height
    for text in axes.texts:
        cell = abs(axes.transData.transform((1, 0))[0] - axes.transData.transform((0, 0))[0])
        assert text.get_window_extent().width <= cell


def detection(scores: np.ndarray, positive: np.ndarray) -> Detection:
    thresholds = np.unique(scores)[::-1]
    found = scores >= thresholds[:, None]
    true, false = (found & positive).sum(1), (found & ~positive).sum(1)
    return Detection(thresholds, true, false, int(positive.sum()), int((~positive).sum()))


def test_the_area_under_a_drawn_curve_is_the_average_precision() -> None:
    scores, positive = RANDOM.random(200).round(2), RANDOM.random(200) < 0.3
    found = detection(scores, positive)
    (line,) = draw("val/precision_recall", PrecisionRecall({"cat": found})).axes[0].lines
    recall, precision = line.get_data()
    assert line.get_drawstyle() == "steps-pre" and recall[0] == 0 and recall[-1] == 1
    assert np.sum(np.diff(recall) * precision[1:]) == pytest.approx(found.average_precision)
    assert line.get_label() == f"{found.average_precision:.3f}  cat"


def test_of_many_classes_the_worst_are_named_and_absent_ones_left_out() -> None:
    positive = np.arange(100) < 20
    classes = {
        f"class {k}": detection(np.where(positive, k / 15, 0.5) + RANDOM.random(100), positive) for k in range(14)
    }
    nobody = detection(RANDOM.random(100), np.zeros(100, bool))
    figure = draw("val/precision_recall", PrecisionRecall({**classes, "nobody": nobody}))
    assert len(figure.axes[0].lines) == 14
    names = [text.get_text().split("  ")[1] for text in figure.legends[0].get_texts()]
    assert names == sorted(classes, key=lambda name: classes[name].average_precision)[:10]


def test_curves_of_nothing_can_be_drawn() -> None:
    assert png(draw("val/precision_recall", PrecisionRecall({})))


def test_a_histogram_has_the_counts_between_the_edges() -> None:
    figure = draw("parameters/weight", Histogram(np.array([1.0, 3.0]), np.array([-1.0, 0.0, 2.0])))
    np.testing.assert_array_equal(figure.axes[0].patches[0].get_data().edges, [-1, 0, 2])
    np.testing.assert_array_equal(figure.axes[0].patches[0].get_data().values, [1, 3])


def test_a_name_that_looks_like_a_formula_or_needs_rare_letters_is_drawn(recwarn: pytest.WarningsRecorder) -> None:
    png(draw("$\\frac$", Matrix(np.eye(2, dtype=int), ["$\\frac{1$", "猫"])))
    assert len(recwarn) == 0


def test_drawing_does_not_touch_the_state_of_pyplot() -> None:
    code = (
        "import sys, numpy as np\n"
        "from isoscale.observe.figures import Histogram, Matrix\n"
        "from isoscale.observe.drawing import draw\nfrom isoscale.observe.style import png\n"
        "for shown in (Matrix(np.eye(2, dtype=int), ['cat', 'dog']), Histogram(np.ones(2), np.arange(3.0))):\n"
        "    print(png(draw('val/a', shown))[1:4].decode())\n"
        "print('matplotlib.pyplot' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["PNG", "PNG", "False"]


def test_curves_are_drawn_with_their_marks_and_their_distance_from_the_first() -> None:
    places, true = np.linspace(-5, 20, 11), RANDOM.random(11)
    marks = {"true": ("Fermi level 8.000 eV", 8.0)}
    curves = Curves(places, {"true": true, "predicted": true + 0.5}, "energy (eV)", "states (1/eV)", marks)
    above, below = draw("val/dos/Be", curves).axes
    np.testing.assert_array_equal(above.lines[0].get_ydata(), true)
    np.testing.assert_allclose(below.lines[1].get_ydata(), np.full(11, 0.5))  # after the mark
    assert [line.get_xdata()[0] for line in (above.lines[1], below.lines[0])] == [8.0, 8.0]
    words = [text.get_text() for text in above.get_legend().get_texts()]
    assert words == ["true", "Fermi level 8.000 eV", "predicted"]
    assert (above.get_ylabel(), below.get_xlabel()) == ("states (1/eV)", "energy (eV)")


def test_curves_on_logarithmic_axes_are_compared_by_their_ratio_within_bands() -> None:
    places, true = np.array([1.0, 10.0, 100.0]), np.array([4.0, 2.0, 0.0])
    bands = {"prediction": (np.full(3, 0.4), np.full(3, 0.6))}
    shown = {"truth": true, "prediction": true / 2}
    above, below = draw("power", Curves(places, shown, "k", "P", {}, "xy", "ratio", bands)).axes
    assert (above.get_xscale(), above.get_yscale(), below.get_yscale()) == ("log", "log", "linear")
    np.testing.assert_array_equal(above.lines[0].get_ydata(), [4, 2, np.nan])
    np.testing.assert_array_equal(below.lines[0].get_ydata(), [0.5, 0.5, np.nan])
    assert below.collections[0].get_datalim(below.transData).intervaly.tolist() == [0.4, 0.6]
    assert below.get_ylabel() == "ratio" and sum(below.get_ylim()) == pytest.approx(2)


def test_bands_have_a_panel_for_each_quantity_and_one_legend() -> None:
    band = Band(np.array([0.9, 0.5]), np.array([0.8, 0.3]), np.array([1.0, 0.7]))
    shown = Bands(np.array([1.0, 2.0]), {"ratio": {"a": band, "b": band}, "r": {"a": band, "b": band}}, "k", "1 σ")
    figure = draw("spectra", shown)
    assert [axes.get_ylabel() for axes in figure.axes] == ["ratio", "r"] and figure.axes[1].get_xlabel() == "k"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "1 σ"]
    np.testing.assert_array_equal(figure.axes[0].lines[0].get_ydata(), band.values)
    assert figure.axes[0].collections[0].get_datalim(figure.axes[0].transData).intervaly.tolist() == [0.3, 1.0]


def test_slices_share_their_colours_in_a_column_and_differences_are_about_zero() -> None:
    values = np.stack([np.full((2, 4, 4), 1.0), np.full((2, 4, 4), -3.0)])
    figure = draw("slices", Slices(values, ["truth", "prediction"], ["a", "b"], [False, True], difference=True))
    images = [axes.images[0] for axes in figure.axes if axes.images]
    assert [image.get_clim() for image in images] == [(-3, 1)] * 2 + [(-4, 4)] + [(-3, 3)] * 2 + [(-4, 4)]
    np.testing.assert_array_equal(images[2].get_array(), np.full((4, 4), -4.0))
    words = {text.get_text() for text in figure.texts}
    assert {"truth", "prediction", "difference", "a", "b", "slices"} <= words


@pytest.mark.parametrize("value", [0.0, 1.0, np.nan])
def test_slices_of_one_value_or_of_none_are_drawn(value: float, recwarn: pytest.WarningsRecorder) -> None:
    values = np.stack([np.zeros((1, 4, 4)), np.full((1, 4, 4), value)])
    assert png(draw("slices", Slices(values, ["truth", "prediction"], ["a"], [True], difference=True)))
    assert len(recwarn) == 0


def test_joint_histograms_have_common_colours_and_the_mean_of_the_first() -> None:
    shares = np.zeros((2, 3, 4))
    shares[0, 0, 1], shares[1, 2, 3] = 0.5, 0.01
    figure = draw("phases", JointHistograms(shares, ["truth", "b"], (0.0, 3.0), (0.0, 4.0), "x", "y", "share"))
    first, second = figure.axes[:2]
    assert first.images[0].get_clim() == second.images[0].get_clim() == (0.01, 0.5)
    assert first.images[0].get_array()[1, 0] == 0.5 and second.images[0].get_array()[3, 2] == 0.01
    np.testing.assert_array_equal(second.lines[0].get_ydata(), [1.5, np.nan, np.nan])
    assert (first.get_title(), second.get_title(), first.get_ylabel()) == ("truth", "b", "y")


def test_parity_has_the_truth_to_the_right_and_leaves_empty_bins_white() -> None:
    counts = np.zeros((4, 4))
    counts[0, 3] = 7  # small, and predicted to be large
    axes = draw("ldos", Parity(counts, 0.0, 2.0, "LDOS", ["mean error 1"])).axes[0]
    (image,) = axes.images
    assert image.get_array()[3, 0] == 7 and image.get_array().mask.sum() == 15
    assert image.get_extent() == [0, 2, 0, 2] and image.origin == "lower"
    assert axes.get_xlabel() == "true LDOS" and axes.get_ylabel() == "predicted LDOS"
    assert "mean error 1" in [text.get_text() for text in axes.texts]


@pytest.mark.parametrize(("offset", "place"), [(0, "left"), (15, "right"), (-15, "left")])
def test_words_in_a_parity_picture_stand_where_no_points_are(offset: int, place: str) -> None:
    counts = np.eye(20, k=offset)
    (words,) = draw("energy", Parity(counts, 0.0, 2.0, "energy", ["mean error 1"])).axes[0].texts
    assert words.get_horizontalalignment() == place


@pytest.mark.parametrize("number", [1, 2, 40])
def test_points_are_inside_the_figure_and_have_their_names_while_they_are_few(number: int) -> None:
    true = RANDOM.random(number)
    names = [f"snapshot {place}" for place in range(number)]
    axes = draw("energy", ParityPoints(names, true, true + 0.1, "energy (eV)")).axes[0]
    np.testing.assert_array_equal(axes.collections[0].get_offsets(), np.stack([true, true + 0.1], 1))
    low, high = axes.get_xlim()
    assert low < true.min() and high > true.max() + 0.1 and axes.get_ylim() == (low, high)
    assert [text.get_text() for text in axes.texts] == (names if number < 13 else [])


def test_a_print_has_more_dots_than_a_screen() -> None:
    figure = draw("a", Histogram(np.ones(3), np.arange(4.0)))
    assert np.array(imread(BytesIO(png(figure, 2))).shape[:2]).tolist() == [700, 1200]
