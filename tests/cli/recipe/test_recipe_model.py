"""`isoscale recipe model`: the layers of a recipe's model, or of a run's."""

import json
from collections.abc import Callable
from pathlib import Path

RESNET = "task.model={class: resnet, depth: 50, in_channels: 1}"
PLAIN = "data.transforms=[{class: divide, by: 16}]"


def test_the_table_has_layers_outputs_parameters_and_the_total(isoscale):
    shown = isoscale("recipe", "model", "images/digits", "task.model.widths=[64, 100, 10]")
    assert shown.code == 0
    assert [line.split() for line in shown.out.splitlines()[1:]] == [
        ["layer", "type", "output", "parameters", "size"],
        ["layers.0", "Linear", "100", "6,500", "26", "kB"],
        ["layers.3", "Linear", "10", "1,010", "4.04", "kB"],
        ["total", "7,510", "30", "kB"],
    ]


def test_a_large_network_is_shown_as_deep_as_fits_and_deeper_on_request(isoscale):
    words = ("recipe", "model", "images/cifar10-resnet18", RESNET, "data={class: digits}", PLAIN)
    blocks = isoscale(*words)
    assert "layer3.5  Bottleneck" in blocks.out and "layer3.5.conv2" not in blocks.out
    assert blocks.out.endswith("--depth 4 shows what these layers are made of\n")
    assert len(isoscale(*words, "--depth", "1").out.splitlines()) < 12
    deepest = isoscale(*words, "--depth", "4").out
    assert "layer3.5.conv2" in deepest and "layer3.0.downsample.1" in deepest and "--depth" not in deepest


def test_without_data_there_are_no_shapes_and_one_line_says_why(isoscale, monkeypatch):
    monkeypatch.delenv("ISOSCALE_DATA", raising=False)
    shown = isoscale("recipe", "model", "images/cifar10-resnet18", "--depth", "1")
    assert shown.code == 0 and "Conv2d" in shown.out
    (reason,) = [line for line in shown.out.splitlines() if line.startswith("no shapes: ")]
    assert "cifar10 is not in data/cifar10" in reason
    assert "output" not in shown.out.splitlines()[0]


def test_a_network_that_does_not_fit_the_data_is_shown_with_the_reason(isoscale):
    shown = isoscale("recipe", "model", "images/digits", "task.model.widths=[63, 10]")
    assert "640" in shown.out and "no shapes: this MLP takes 63 numbers per sample" in shown.out


def test_json_has_every_layer_and_what_is_not_trained(isoscale):
    found = json.loads(isoscale("recipe", "model", "images/cifar10-fast", "--json").out)
    layers = {layer["name"]: layer for layer in found["layers"]}
    assert found["num_parameters"] > found["num_trainable"] == layers[""]["num_trainable"]
    assert layers["stages.0.conv1"]["kind"] == "Conv2d" and layers["stages.0.conv1"]["shape"] is None
    assert found["without_shapes"].startswith("cifar10 is not in")
    top = json.loads(isoscale("recipe", "model", "images/cifar10-fast", "--json", "--depth", "1").out)
    assert {layer["depth"] for layer in top["layers"]} == {0, 1}


def test_precision_counts_in_the_size(isoscale):
    found = json.loads(isoscale("recipe", "model", "images/digits", "train.precision=64", "--json").out)
    assert found["num_bytes"] == 8 * found["num_parameters"]


def test_a_run_is_shown_as_it_was_or_with_changes(isoscale, copied: Callable[[], Path]):
    run = copied()
    as_it_was = isoscale("recipe", "model", str(run))
    assert as_it_was.code == 0 and "layers.6  Linear  10           2,570" in as_it_was.out
    assert isoscale("recipe", "model", run.name).out == as_it_was.out
    assert "100" in isoscale("recipe", "model", str(run), "task.model.widths=[64, 100, 10]").out
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({key: value for key, value in record.items() if key != "layers"}))
    assert isoscale("recipe", "model", str(run)).out == as_it_was.out


def test_a_run_whose_task_was_given_in_python_is_shown_but_cannot_be_changed(isoscale, copied: Callable[[], Path]):
    run = copied()
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "given": "Mine"}))
    assert "Linear" in isoscale("recipe", "model", str(run)).out
    refused = isoscale("recipe", "model", str(run), "task.model.widths=[64, 100, 10]")
    assert refused.code == 2 and "the task of this run, Mine, was given in Python" in refused.err


def test_a_recipe_that_is_wrong_is_refused(isoscale):
    refused = isoscale("recipe", "model", "images/digits", "task.model.class=mpl")
    assert refused.code == 2 and "Traceback" not in refused.err
    assert isoscale("recipe", "model", "nowhere").code == 2
