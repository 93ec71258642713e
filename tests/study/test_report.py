import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import isoscale
from isoscale.errors import UserError
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
from isoscale.study.report import write_report
from isoscale.study.report.charts import MOST_POINTS
from isoscale.study.report.figures import results
from isoscale.study.report.page import templates
from tests.helpers import QUIET, train
from tests.study.browser import Document, needs_chromium, show
from tests.study.conftest import rows

EVIL = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">&\"'"


def written(run: isoscale.Run, split: str | None = None) -> Document:
    return Document(write_report(run, Path("page.html"), split).read_text(encoding="utf-8"))


def words(document: Document) -> str:
    return next(each.text for each in document.elements if each.tag == "main")


@pytest.fixture(scope="module")
def page(digits: isoscale.Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(digits, tmp_path_factory.mktemp("page") / "report.html")


def test_the_page_is_one_small_file_that_asks_for_nothing(page: Path):
    text = page.read_text(encoding="utf-8")
    assert len(text.encode()) < 1_500_000
    document = Document(text)
    assert not document.all("link") and not document.all("iframe")
    sources = [
        value for each in document.elements for name, value in each.attributes.items() if name in ("src", "href")
    ]
    assert sources and all(source.startswith("data:image/") for source in sources)
    style = "".join(re.findall(r"<style>(.*?)</style>", text, re.DOTALL))
    assert style and "url(" not in style and "@import" not in style
    policy = next(each.attributes["content"] for each in document.all("meta") if "http-equiv" in each.attributes)
    assert policy.startswith("default-src 'none'; img-src data:;")


@needs_chromium
def test_a_browser_shows_it_without_complaint(page: Path):
    shown = show(page)
    assert shown.complaints == []
    assert len(shown.document.all("figure", "chart")) == len(Document(page.read_text()).all("figure", "chart")) > 2


def test_every_metric_has_a_chart_with_a_line_for_each_stage(page: Path, digits: isoscale.Run):
    document = Document(page.read_text(encoding="utf-8"))
    charts = {each.text: each.inside[-2] for each in document.all("h3") if "chart" in each.inside[-2].classes}
    assert list(charts)[:2] == ["loss", "accuracy"] and "lr" in charts and "time/seconds" not in charts
    for drawing in (each for each in document.all("svg") if "data-by" in each.attributes):
        lines = [each.attributes["class"] for each in document.all("g") if drawing in each.inside and each.classes]
        if charts["loss"] in drawing.inside:
            assert lines == ["train-window", "train", "val"]
    drawings = [
        each.attributes for each in document.all("svg") if charts["loss"] in each.inside and "role" in each.attributes
    ]
    assert [(each["data-by"], each["data-scale"]) for each in drawings] == [
        ("step", "linear"), ("step", "log"), ("time", "linear"), ("time", "log"),
    ]  # fmt: skip
    data = json.loads(next(each.text for each in document.all("script") if charts["loss"] in each.inside))
    assert data[-1]["name"] == "validation"
    assert list(zip(data[-1]["step"], map(float, data[-1]["value"]), strict=True)) == [
        (step, pytest.approx(value, rel=1e-3)) for step, value in digits.history("val/loss")
    ]


VISIBLE = """<script>
for (const drawing of document.querySelectorAll(".chart svg[data-by]"))
  drawing.setAttribute("data-shown", getComputedStyle(drawing).display !== "none");
const first = [...document.querySelectorAll(".chart svg[data-by]")].find((each) => each.dataset.shown === "true");
const box = first.getBoundingClientRect();
const at = (kind, share) => first.dispatchEvent(new PointerEvent(kind, { clientX: box.left + share * box.width }));
at("pointermove", 1);
const readout = first.closest("figure").querySelector(".readout");
readout.title = readout.textContent;
at("pointerleave", 1);
</script>"""


@needs_chromium
@pytest.mark.parametrize(
    ("fragment", "by", "scale"), [("", "step", "linear"), ("#time", "time", "linear"), ("#time,log", "time", "log")]
)
@pytest.mark.slow
def test_the_switches_choose_the_axes_and_the_pointer_reads_values(
    page: Path, digits: isoscale.Run, fragment: str, by: str, scale: str
):
    unguarded = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text(encoding="utf-8"))
    probe = page.with_name("probe.html")
    probe.write_text(unguarded.replace("</body>", f"{VISIBLE}</body>"), encoding="utf-8")
    shown = show(probe, fragment)
    assert shown.complaints == []
    drawings = [each.attributes for each in shown.document.all("svg") if "data-shown" in each.attributes]
    visible = [each for each in drawings if each["data-shown"] == "true"]
    assert len(visible) == len(shown.document.all("figure", "chart"))
    assert {each["data-by"] for each in visible} == {by}
    assert visible[0]["data-scale"] == scale
    readout = shown.document.all("p", "readout")[0]
    loss = f"{digits.metrics['val/loss']:.4g}"
    assert readout.attributes["title"].startswith("step 46 · " if by == "step" else "")
    assert f"validation {loss}" in readout.attributes["title"]
    assert readout.text.startswith("last: training")


def test_what_the_task_shows_is_on_the_page(page: Path):
    document = Document(page.read_text(encoding="utf-8"))
    assert document.all("figure", "matrix") and document.all("figure", "precisionrecall")
    pictures = document.all("div", "picture")
    assert pictures and all("right" in each.classes or "wrong" in each.classes for each in pictures)
    images = [each for each in document.all("img")]
    assert images and all(each.attributes["alt"] for each in images)
    assert "The best weights on the validation data." in words(document)


@pytest.mark.slow
def test_figures_of_the_test_data_and_a_page_without_figures(digits: isoscale.Run, tmp_path: Path):
    tested = write_report(digits, tmp_path / "a.html", "test").read_text(encoding="utf-8")
    assert "The best weights on the test data." in tested
    without = Document(write_report(digits, tmp_path / "b.html", None).read_text(encoding="utf-8"))
    assert "Results" not in [each.text for each in without.all("h2")] and not without.all("img")


def test_by_default_the_page_lies_in_the_run(make):
    run = make("a")
    assert write_report("a") == run.path / "report.html"


@pytest.mark.parametrize("name", ["page.pdf", "nowhere/page.html"])
def test_a_place_that_cannot_be_written_is_refused(make, name):
    with pytest.raises(UserError, match="--out"):
        write_report(make("a"), name)


def test_the_head_tells_how_the_run_went(make):
    page = words(written(make("a", rows("val/accuracy", [0.1, 0.9, 0.8]), layers=[LAYER])))
    for text in ("done", "best val/accuracy0.9000epoch 2, step 20", "steps40of 40", "training time8.0 s", "85,002"):
        assert text in page
    failed = written(make("b", [], status="failed", message="out of memory\non this device"))
    assert failed.all("pre", "failed")[0].text == "out of memory\non this device"
    assert "Nothing was logged." in words(failed)
    assert "last heard of 1970-01-01" in words(written(make("c", status="running", step=None, seconds=None)))


LAYER = {
    "name": "", "kind": "MLP", "depth": 0, "num_parameters": 85002, "num_trainable": 85000, "num_bytes": 2048,
    "shape": [64, 10],
}  # fmt: skip


def test_layers_and_profile_are_tables_where_they_were_recorded(make):
    profile = [{"name": "forward", "calls": 4, "seconds": 0.5}, {"name": "total", "calls": 1, "seconds": 2.0}]
    page = words(written(make("a", layers=[LAYER], profile=profile)))
    assert "modelMLP64 × 1085,00285,0002 KiB" in page
    assert "forward25.0 %0.5004125 ms" in page
    assert "Where the time went" not in words(written(make("b"))) and "Layers" not in words(written(Path("b")))


def test_settings_of_the_user_come_first_with_their_origin(make):
    document = written(make("a", None, ["optimizer.lr=0.1", "task.model.widths=[64, 10]"]))
    assert own_settings(document) == ["task.model.widths[64, 10]command line", "optimizer.lr0.1command line"]
    everything = [each.text for each in document.all("tr")]
    assert "data.batch_size64images/digits.yaml:27" in everything and "namenulldefault" in everything


def own_settings(document: Document) -> list[str]:
    return [each.text for each in document.all("tr") if any("own" in around.classes for around in each.inside)][1:]


@pytest.mark.slow
def test_a_continued_run_still_knows_what_the_user_set(tmp_path: Path):
    run = train(tmp_path / "a", seed=0, train__epochs=1)
    train(tmp_path / "a", None, train__epochs=2)
    own = own_settings(Document(write_report(run, split=None).read_text(encoding="utf-8")))
    assert own[:2] == ["seed0Python call", "train.epochs2Python call"]
    assert all(text.startswith("observe.") for text in own[2:])


def test_the_environment_and_the_way_to_have_the_run_again(make):
    code = {"folder": "/x", "commit": "c0ffee", "diff": "+ <b>mine</b>"}
    page = words(written(make("a", code=code, peak_memory=3 * 1024**2)))
    for text in (
        "isoscale0.1.0",
        "torch 2.13.0+cpu",
        "hosthere",
        "seed0",
        "train aa, val bb",
        "3.0 MiB",
        "+ <b>mine</b>",
    ):
        assert text in page
    assert "git checkout c0ffee\npip install isoscale==0.1.0 torch==2.13.0\nisoscale train " in page
    assert "was given in Python" in words(written(make("b", given="MyTask")))


def test_a_value_that_is_no_number_is_marked(make):
    document = written(make("a", rows("val/loss", [2.0, math.nan, 1.0])))
    marks = document.all("g", "bad")
    assert len(marks) == 4 and all("nan at step 20" in each.text for each in marks)
    paths = [each.attributes["d"] for each in document.all("path") if "val" in each.inside[-1].classes]
    assert len(paths) == 4 and all(path.count("L") == 1 for path in paths)


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [-1.0, 1.0], [math.nan], [math.inf, 1.0], [1e-300, 1e300]])
def test_any_values_are_drawn(make, values):
    document = written(make("a", rows("val/loss", values)))
    numbers = [value for each in document.all("path") for value in re.findall(r"[-\d.a-z]+", each.attributes["d"][1:])]
    assert document.all("figure", "chart") and not any("nan" in number or "inf" in number for number in numbers)


def test_a_long_curve_keeps_its_peaks(make):
    values = [1.0 + 0.001 * (number % 7) for number in range(20_000)]
    values[12_345] = 50.0
    document = written(make("a", rows("val/loss", values)))
    data = json.loads(next(each.text for each in document.all("script") if each.inside[-1].tag == "figure"))
    assert len(data[0]["step"]) < 1.2 * MOST_POINTS
    assert "50.00" in data[0]["value"] and data[0]["step"][-1] == 200_000


def test_an_axis_has_a_few_round_ticks(make):
    document = written(make("a", rows("val/loss", [0.0011, 9.9], every=115)))
    texts = {
        drawing.attributes["data-scale"]: [each.text for each in document.all("text") if drawing in each.inside]
        for drawing in document.all("svg")
        if drawing.attributes.get("data-by") == "step"
    }
    assert texts["linear"] == ["0", "50", "100", "150", "200", "step", "0", "5", "10"]
    assert texts["log"][6:] == ["0.001", "0.01", "0.1", "1", "10"]


@pytest.mark.slow
def test_the_same_run_gives_the_same_bytes(page: Path, digits: isoscale.Run, tmp_path: Path):
    assert write_report(digits, tmp_path / "again.html").read_bytes() == page.read_bytes()


@pytest.mark.slow
def test_a_run_without_its_data_says_so_in_a_line(digits: isoscale.Run, make, monkeypatch):
    def broken(*arguments, **options):
        raise OSError("the disk is gone")

    monkeypatch.setattr("isoscale.runs.inference.figures", broken)
    assert "Results could not be made: OSError: the disk is gone" in words(written(digits, "val"))
    assert "There is no checkpoint that results could be made with." in words(written(make("a"), "val"))


class Regression(isoscale.Supervised):
    """A task of the user's, with labels that are not to be trusted."""

    def show_results(self, source, outputs):
        counts = np.array([[5, 1], [0, 0]])
        detection = Detection(np.array([0.9, 0.1]), np.array([1, 2]), np.array([0, 1]), 2, 1)
        return {
            EVIL: Matrix(counts, [EVIL, "b"], rows=EVIL, columns=EVIL),
            "pr": PrecisionRecall({EVIL: detection, "never": Detection(*[np.zeros(0)] * 3, 0, 3)}),
            "pictures": Pictures(np.zeros((2, 4, 4, 3), np.uint8), [EVIL, "fine"], [False, True]),
            "errors": Histogram(np.array([1.0, 3.0]), np.array([-1.0, 0.0, 1.0])),
            "parity": ParityPoints([EVIL, "b"], np.arange(2.0), np.arange(2.0), EVIL),
            "dos": Curves(np.arange(2.0), {EVIL: np.arange(2.0)}, EVIL, EVIL),
            "spectra": Bands(np.arange(1.0, 3), {EVIL: {EVIL: Band(*[np.ones(2)] * 3)}}, EVIL, EVIL, (EVIL, 1.0)),
            "slices": Slices(np.ones((1, 1, 2, 2)), [EVIL], [EVIL], [True], EVIL),
            "phases": JointHistograms(np.ones((1, 2, 2)), [EVIL], (0.0, 1.0), (0.0, 1.0), EVIL, EVIL, EVIL),
        }


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run in which everything that can be named is named by an attacker."""
    folder = tmp_path_factory.mktemp("evil") / EVIL.replace("/", "∕")
    inputs = torch.arange(32.0).reshape(8, 4)
    data = isoscale.Sources(train=(inputs, inputs[:, :1]), val=(inputs, inputs[:, :1]))
    settings = {"train": {"epochs": 2}, "data": {"batch_size": 4}, "name": EVIL}
    run = isoscale.Trainer(settings, run=folder, **QUIET).fit(Regression(nn.Linear(4, 1), "mse"), data)
    with (run.path / "metrics.jsonl").open("a") as file:
        for step in (1, 2):
            file.write(json.dumps({"step": step, "epoch": 0, "name": EVIL, "value": 1.0, "time": 1.0}) + "\n")
    run.directory.update(message=EVIL, status=EVIL, host=EVIL, code={"commit": EVIL, "diff": EVIL}, given=EVIL)
    return write_report(run, folder.parent / "page.html")


def test_nothing_in_a_run_becomes_markup(evil: Path):
    document = Document(evil.read_text(encoding="utf-8"))
    assert EVIL in words(document)
    assert not [each for each in document.elements for name in each.attributes if name.startswith("on")]
    kinds = [each.attributes.get("type") for each in document.all("script")]
    assert kinds == ["application/json"] * (len(kinds) - 1) + [None]
    assert all(each.attributes["src"].startswith("data:image/png;base64,") for each in document.all("img"))
    assert [each.attributes["alt"] for each in document.all("img")] == [f"wrong: {EVIL}", "right: fine"]
    shown = [each.text for each in document.all("text") if each.inside[-1].tag == "g"]
    assert f"predicted {EVIL}" in shown and EVIL in shown


@needs_chromium
def test_a_browser_runs_nothing_of_it(evil: Path):
    shown = show(evil)
    assert shown.complaints == []
    assert "script" in shown.document.all("title")[0].text


def test_a_matrix_counts_and_is_coloured_by_row(evil: Path):
    document = Document(evil.read_text(encoding="utf-8"))
    cells = [each for each in document.all("td") if any("matrix" in around.classes for around in each.inside)]
    assert [each.text for each in cells] == ["5", "1", "83.3 %", "·", "·", "0.0 %"]
    assert [each.attributes.get("style") for each in cells[:2]] == ["--strength:91%", "--strength:41%"]
    assert "as b (1)." in words(document)


def test_classes_that_never_occur_have_no_average_precision(evil: Path):
    rows_ = [each.text for each in Document(evil.read_text(encoding="utf-8")).all("tr") if "0.8333" in each.text]
    assert rows_ == [f"{EVIL}0.83332"]
    assert "never0" not in evil.read_text(encoding="utf-8")


def rendered(figures: dict) -> str:
    return templates().get_template("results.html").render(results={"figures": results(figures)})


@pytest.mark.slow
def test_many_classes_and_large_pictures_stay_small():
    labels = [f"class {number}" for number in range(120)]
    detection = Detection(np.linspace(1, 0, 900), np.arange(900), np.arange(900), 900, 900)
    generator = np.random.default_rng(0)
    shown = rendered(
        {
            "confusion": Matrix(np.eye(120, dtype=np.int64), labels),
            "pr": PrecisionRecall(dict.fromkeys(labels, detection)),
            "pictures": Pictures(generator.integers(0, 255, (60, 500, 400, 3), dtype=np.uint8)),
        }
    )
    document = Document(shown)
    assert len(shown) < 1_200_000
    assert len(document.all("div", "picture")) == 48 and "12 more are not shown." in shown
    assert not [each for each in document.all("td") if any("matrix" in around.classes for around in each.inside)]
    assert "113 more" in shown and "Nothing is off the diagonal." in shown


def test_curves_and_predictions_against_the_truth_are_drawings_with_words():
    values = np.arange(3.0)
    shown = rendered(
        {
            "dos": Curves(values, {"true": values, "predicted": values}, "energy", "states"),
            "ldos": Parity(np.eye(3), 0, 1, "LDOS"),
            "energies": ParityPoints(["a", "b", "c"], values, values, "energy"),
            "spectra": Bands(1 + values, {"r": {"density": Band(values, values, values)}}, "k"),
            "slices": Slices(np.ones((2, 1, 4, 4)), ["truth", "prediction"], ["density"], [False]),
            "phases": JointHistograms(np.ones((1, 2, 2)), ["truth"], (0.0, 1.0), (0.0, 1.0), "density", "T", "share"),
        }
    )
    document = Document(shown)
    titles = [each for each in document.all("title") if each.inside[-1].attributes.get("role") == "img"]
    assert [title.text for title in titles] == [
        "states against energy: true, predicted",
        "predicted against true LDOS",
        "predicted against true energy",
        "r against k: density",
        "truth, prediction: slices of density",
        "T against density: truth",
    ]
    assert all(each.attributes["xlink:href"].startswith("data:image/png;base64,") for each in document.all("image"))
