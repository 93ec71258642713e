import json
import math
import string
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from isoscale.recipe.formats.tree import plain
from isoscale.recipe.formats.yaml_reader import read_yaml
from isoscale.recipe.formats.yaml_writer import write_yaml
from isoscale.recipe.load import load_recipe
from isoscale.recipe.problems import RecipeError


@pytest.fixture
def write(tmp_path):
    def write_file(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def test_without_a_source_the_default_preset_is_loaded():
    loaded = load_recipe()
    assert loaded.name == "digits"
    assert loaded.values == load_recipe("images/digits").values
    assert loaded.recipe.optimizer.lr == 2e-3
    assert "extends" not in loaded.values


def test_values_are_json_with_defaults_and_class_names():
    values = load_recipe("images/digits").values
    assert json.loads(json.dumps(values)) == values
    assert values["task"]["class"] == "classifier"
    assert values["checkpoint"]["keep"] == 2


def test_every_value_has_an_origin(write):
    path = write("my.yaml", "extends: images/digits\n\noptimizer:\n  lr: 0.5\n")
    origins = load_recipe(path, ["train.epochs=3"]).origins
    assert origins["optimizer", "lr"] == f"{path}:4"
    assert origins["optimizer", "name"].startswith("images/digits.yaml:")
    assert origins["train", "epochs"] == "command line"
    assert origins["train", "clip"] == "default"
    assert origins["data", "transforms", 1].startswith("images/digits.yaml:")


def test_names_come_from_the_recipe_then_the_file_then_the_kind(write):
    assert load_recipe(write("mine.yml", "seed: 1")).name == "mine"
    assert load_recipe(write("mine.json", '{"name": "other"}')).name == "other"
    assert load_recipe({}).name == "recipe"


def test_extends_is_relative_to_the_file_and_later_ones_win(write):
    write("base/a.yaml", "seed: 1\ntrain: {epochs: 1, clip: 1}\n")
    write("base/b.yaml", "extends: a.yaml\ntrain: {epochs: 2}\n")
    write("c.json", '{"train": {"steps": 7}, "data": {"transforms": ["x"]}}')
    recipe = load_recipe(write("d.yaml", "extends: [base/b.yaml, c.json]\ndata: {transforms: []}\n")).recipe
    assert (recipe.seed, recipe.train.epochs, recipe.train.clip, recipe.train.steps) == (1, 2, 1.0, 7)
    assert recipe.data.transforms == []


@pytest.mark.parametrize("key", ["class", "_target_", "class_path"])
def test_another_class_replaces_the_arguments_of_the_first(write, key):
    write("base.yaml", "task: {model: {class: mlp, widths: [1], dropout: 0.5}}")
    other = load_recipe(write("other.yaml", f"extends: base.yaml\ntask: {{model: {{{key}: my.Net, depth: 3}}}}"))
    assert other.values["task"]["model"] == {"class": "my.Net", "depth": 3}


@pytest.mark.parametrize("name", ["mlp", "MLP", "isoscale.science.models.MLP", "isoscale.science.models:MLP"])
def test_the_same_class_under_another_name_keeps_the_arguments(write, name):
    write("base.yaml", "task: {model: {class: mlp, widths: [1], dropout: 0.5}}")
    same = load_recipe(write("same.yaml", f"extends: base.yaml\ntask: {{model: {{_target_: '{name}', widths: [2]}}}}"))
    assert same.values["task"]["model"] == {"class": name, "widths": [2], "dropout": 0.5}


def test_init_args_are_arguments(write):
    text = "task: {class_path: a.B, init_args: {x: 1, net: {_target_: c.D, y: 2}}}"
    task = load_recipe(write("my.yaml", text)).recipe.task
    assert task.class_ == "a.B"
    assert task.arguments == {"x": 1, "net": {"class": "c.D", "y": 2}}


def test_two_names_for_the_class_are_a_problem():
    with pytest.raises(RecipeError, match="says the class a second time"):
        load_recipe({"task": {"class": "a.B", "_target_": "c.D"}})


def test_recipes_that_extend_each_other_are_refused_with_the_chain(write):
    a = write("a.yaml", "extends: b.yaml")
    b = write("b.yaml", "seed: 1\nextends: ./x/../a.yaml")
    with pytest.raises(RecipeError, match="in a circle") as caught:
        load_recipe(a)
    assert f"{a} → {b} → {a}" in str(caught.value)
    assert f"{b}:2" in str(caught.value)


def test_two_recipes_may_extend_the_same_one(write):
    write("base.yaml", "seed: 5")
    write("a.yaml", "extends: base.yaml")
    write("b.yaml", "extends: base.yaml")
    assert load_recipe(write("c.yaml", "extends: [a.yaml, b.yaml]")).recipe.seed == 5


def test_a_missing_base_says_who_asked_for_it(write):
    path = write("my.yaml", "seed: 1\nextends: images/digit\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert 'did you mean "images/digits"?' in str(caught.value)


@pytest.mark.parametrize("extends", ["3", "{a: b}", "[images/digits, 3]"])
def test_extends_must_be_names(write, extends):
    with pytest.raises(RecipeError, match="extends: expected the name of a preset"):
        load_recipe(write("my.yaml", f"extends: {extends}"))


def test_an_unknown_name_suggests_a_preset_and_the_command():
    with pytest.raises(RecipeError) as caught:
        load_recipe("image/digits")
    assert 'did you mean "images/digits"?' in str(caught.value)
    assert "isoscale recipe list" in str(caught.value)


def test_an_unknown_name_suggests_a_file_beside_it(write, tmp_path):
    (tmp_path / "input_water.json").write_text("{}")
    for name in ("input_water.jsn", "inputwater.json", "input_water"):
        with pytest.raises(RecipeError, match=r"did you mean .*input_water\.json"):
            load_recipe(str(tmp_path / name))


@pytest.mark.parametrize("source", ["", " ", "../images/digits", "nowhere.yaml", Path("images/digits")])
def test_what_is_not_there_is_not_found(source):
    with pytest.raises(RecipeError, match="there is no preset or file"):
        load_recipe(source)


def test_a_folder_is_no_recipe_but_the_one_inside_is_suggested(write, tmp_path):
    with pytest.raises(RecipeError, match="is a folder"):
        load_recipe(tmp_path)
    path = write("recipe.yaml", "seed: 1")
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(tmp_path))
    assert f'did you mean "{path}"?' in str(caught.value)


def test_a_file_of_another_kind_is_refused(write):
    with pytest.raises(RecipeError, match=r"ends in \.yaml, \.yml, \.json"):
        load_recipe(write("my.toml", "seed = 1"))


def test_a_mapping_may_hold_tuples_and_paths_but_no_objects():
    loaded = load_recipe({"extends": "images/digits", "data": {"path": Path("x"), "sizes": (1, 2)}})
    assert loaded.values["data"]["path"] == "x"
    assert loaded.values["data"]["sizes"] == [1, 2]
    assert loaded.origins["data", "path"] == "Python call"
    with pytest.raises(RecipeError, match=r"data\.path: a object cannot be written"):
        load_recipe({"data": {"path": object()}})
    with pytest.raises(RecipeError, match="the key 3 is not text"):
        load_recipe({"data": {3: 1}})


def test_loading_does_not_import_torch():
    code = "import sys; from isoscale.recipe.load import load_recipe; load_recipe(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_resolved_recipe_reads_back_as_the_same_values(write):
    text = "extends: images/digits\ntask: {init_from: {run: x}}\ntrain: {loss_weights: {a: 1, b: {start: 0, end: 1}}}\n"
    loaded = load_recipe(write("my.yaml", text), ["optimizer.betas=[0.9, 0.99]", "observe.every=7"])
    again = load_recipe(write("again.yaml", loaded.to_yaml()))
    assert again.values == loaded.values
    assert again.to_yaml().count("#") == loaded.to_yaml().count("#")


def test_each_line_of_a_value_ends_in_its_origin():
    lines = load_recipe("images/digits", ["train.epochs=3"]).to_yaml().splitlines()
    assert "  epochs: 3  # command line" in lines
    assert "    widths: [64, 256, 256, 10]  # images/digits.yaml:17" in lines
    assert all("  # " in line for line in lines if not line.endswith(":"))


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.text(alphabet=string.printable)
    | st.sampled_from(
        ["null", "~", "1e3", "no", "- a", "a: b", "a #b", "#", "'", '"', "\\", "\t", "\x85", "0x1", ".inf"]
    )
)
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=15)


@given(st.dictionaries(st.text(), values))
@example({"a": [[], {}, [[1], {"b": []}], {"": None}], "\u2028": "\ufeff", "big": 10**40, "tiny": 5e-324})
@example({"surrogate": "\ud800", "emoji": "😀", "inf": -math.inf, "breaks": "a\r\nb\n", "zero": -0.0})
def test_what_is_written_reads_back_equal(written):
    problems = []
    text = write_yaml(written, {("a",): "odd\nname.yaml:3"})
    assert plain(read_yaml(text, "x.yaml", problems)) == (written or {})
    assert not problems


@given(st.dictionaries(st.text(), values, max_size=3))
@pytest.mark.slow
def test_any_arguments_survive_a_load_and_a_write(arguments):
    loaded = load_recipe({"task": {"class": "a.B", "argument": {"inner": arguments}}})
    again = plain(read_yaml(loaded.to_yaml(), "x.yaml", []))
    assert again == loaded.values
    assert load_recipe(again).values == loaded.values
