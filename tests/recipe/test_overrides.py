import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isoscale.recipe.formats.tree import PYTHON_CALL, from_plain, plain
from isoscale.recipe.load import load_recipe
from isoscale.recipe.overrides import apply_overrides
from isoscale.recipe.problems import RecipeError


def apply(values, *overrides):
    problems = []
    node = apply_overrides(from_plain(values, PYTHON_CALL, problems), overrides, problems)
    return plain(node), [str(problem) for problem in problems]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("a=3e-4", {"a": 3e-4}),
        ("a.b.c=[64,64]", {"a": {"b": {"c": [64, 64]}}}),
        ("a=null", {"a": None}),
        ("a=", {"a": None}),
        ("a=x=y", {"a": "x=y"}),
        ("a={b: 1, c: {d: no}}", {"a": {"b": 1, "c": {"d": "no"}}}),
        ('a="1"', {"a": "1"}),
        ("a=01:00:00", {"a": "01:00:00"}),
        ("a._target_=x.Y", {"a": {"class": "x.Y"}}),
        ("a={class_path: x.Y, init_args: {b: 1}}", {"a": {"class": "x.Y", "b": 1}}),
    ],
)
def test_values_are_read_by_the_rules_of_the_file(override, expected):
    assert apply({}, override) == (expected, [])


def test_an_override_sets_only_what_it_names():
    values = {"a": {"b": 1, "c": 2}, "d": [{"e": 1}, {"e": 2}], "n": None}
    assert apply(values, "a.b=3", "d.1.e=4", "n.x=5")[0] == {
        "a": {"b": 3, "c": 2},
        "d": [{"e": 1}, {"e": 4}],
        "n": {"x": 5},
    }
    assert values["a"]["b"] == 1


def test_the_recipe_that_was_read_stays_as_it_was():
    node = from_plain({"a": {"b": 1}, "d": [1, 2]}, PYTHON_CALL, [])
    apply_overrides(node, ["a.b=2", "a.c=3", "~d.0", "d.0=4"], [])
    assert plain(node) == {"a": {"b": 1}, "d": [1, 2]}


def test_later_overrides_win():
    assert apply({}, "a=1", "a=2", "~a", "a.b=3")[0] == {"a": {"b": 3}}


def test_deleting_removes_keys_and_entries():
    values = {"a": {"b": 1, "c": 2}, "d": [1, 2, 3]}
    assert apply(values, "~a.b", "~d.1") == ({"a": {"c": 2}, "d": [1, 3]}, [])


def test_deleting_a_section_brings_its_defaults_back():
    assert load_recipe("images/digits", ["~schedule"]).recipe.schedule.name == "constant"


def test_origins_of_a_list_move_with_its_entries():
    loaded = load_recipe("images/digits", ["~data.transforms.0"])
    assert loaded.values["data"]["transforms"] == ["flatten"]
    assert loaded.origins["data", "transforms", 0] == load_recipe().origins["data", "transforms", 1]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("~a.bb", 'command line: a.bb: not set in this recipe, so there is nothing to delete; did you mean "bbb"?'),
        ("~zzz.y", "command line: zzz.y: not set"),
        ("a", 'cannot read "a": write key=value to set, or ~key to delete'),
        ("~a=1", 'cannot read "~a=1"'),
        ("=1", "a key is words with single points"),
        ("a..b=1", "a key is words with single points"),
        ("~", "a key is words with single points"),
        ("", "cannot read"),
        ("d.5=1", "d is a list; its entries are numbered 0 to 1"),
        ("d.-1=1", "d is a list"),
        ("d.x=1", "d is a list"),
        ("~d.2", "d is a list"),
        ("s.x.y=1", "s is the single value 'text'"),
        ("a=[1", "a: cannot read the value '[1'"),
        ("a=@x", "a: cannot read the value '@x'"),
        ("extends=images/digits", "extends: belongs in a file"),
    ],
)
def test_what_cannot_be_applied_is_a_problem_and_changes_nothing_else(override, words):
    values = {"a": {"bbb": 1}, "d": [1, 2], "s": "text"}
    changed, problems = apply(values, override)
    assert len(problems) == 1
    assert words in problems[0]
    assert {**changed, "a": 0} == {**values, "a": 0}


def test_a_mapping_of_overrides_is_taken_as_it_is():
    loaded = load_recipe("images/digits", {"train.epochs": 3, "task.note": "1e3", "data.transforms.0.by": 8})
    assert loaded.recipe.train.epochs == 3
    assert loaded.values["task"]["note"] == "1e3"
    assert loaded.values["data"]["transforms"][0] == {"class": "divide", "by": 8}
    assert loaded.origins["train", "epochs"] == "Python call"


def test_a_single_override_may_be_a_string():
    assert load_recipe("images/digits", "train.epochs=3").recipe.train.epochs == 3


def test_an_unreadable_override_is_one_problem():
    with pytest.raises(RecipeError) as caught:
        load_recipe("images/digits", ["optimizer.lr=@x"])
    assert len(caught.value.problems) == 1


keys = st.text(alphabet=string.ascii_lowercase, min_size=1, max_size=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.text(alphabet=string.ascii_letters + " :#,[]{}-"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(keys, min_size=1, max_size=4), json_values)
def test_any_json_value_can_be_set_anywhere_and_deleted_again(path, value):
    if path == ["extends"]:
        return
    key = ".".join(path)
    expected = value
    for part in reversed(path):
        expected = {part: expected}
    assert apply({}, f"{key}={json.dumps(value)}") == (expected, [])
    changed, problems = apply(expected, f"~{key}")
    assert not problems
    for part in path[:-1]:
        changed = changed[part]
    assert changed == {}


@given(st.text())
def test_any_override_is_applied_or_becomes_a_problem(text):
    before = {"a": {"b": [1]}}
    for override in (text, f"~{text}"):
        changed, problems = apply(before, override)
        if "=" not in text:
            assert len(problems) == (changed == before)
    changed, problems = apply(before, f"a.b.0={text}")
    assert problems or (changed.keys() == {"a"} and changed["a"].keys() == {"b"} and len(changed["a"]["b"]) == 1)
