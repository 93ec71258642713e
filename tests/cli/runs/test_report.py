import webbrowser
from pathlib import Path

import pytest


def test_the_newest_run_gets_a_page_in_its_directory(isoscale, copied):
    run = copied()
    shown = isoscale("report")
    assert shown.code == 0 and shown.out == f"written to {run}/report.html\n"
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "The best weights on the validation data." in page


@pytest.mark.slow
def test_the_page_goes_elsewhere_and_shows_other_data_or_none(isoscale, copied):
    run = str(copied())
    assert isoscale("report", run, "--out", "a.html", "--role", "test").out == "written to a.html\n"
    assert "weights on the test data" in Path("a.html").read_text(encoding="utf-8")
    isoscale("report", run, "--out", "b.html", "--no-figures")
    assert "Results" not in Path("b.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("starts", [True, False])
@pytest.mark.slow
def test_the_page_is_opened_and_where_that_fails_it_says_so(isoscale, copied, monkeypatch, starts):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or starts)
    shown = isoscale("report", str(copied()), "--no-figures", "--open")
    assert opened[0].startswith("file:///") and opened[0].endswith("runs/digits-1/report.html")
    assert shown.code == (0 if starts else 2) and ("no browser could be started" in shown.err) is not starts


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b c"], "a report is about one run; to see several side by side: isoscale compare a 'b c'"),
        (["nothing"], "there is no run in nothing"),
        (["runs/digits-1", "--out", "page.pdf"], "a report is written as .html"),
        (["runs/digits-1", "--out", "nowhere/page.html"], "there is no folder nowhere"),
    ],
)
def test_what_cannot_be_reported_is_refused(isoscale, copied, words, message):
    copied()
    refused = isoscale("report", *words)
    assert refused.code == 2 and message in refused.err and refused.out == ""
