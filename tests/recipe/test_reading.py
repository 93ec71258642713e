import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from isoscale.recipe.formats.json_reader import read_json
from isoscale.recipe.formats.tree import origins, plain
from isoscale.recipe.formats.yaml_reader import read_yaml
from isoscale.recipe.presets import locate, read_location
from isoscale.recipe.problems import RecipeError


def value_of(text):
    problems = []
    node = read_yaml(f"x: {text}\n", "my.yaml", problems)
    assert not problems
    return plain(node)["x"]


def read(text, name="my.yaml"):
    problems = []
    reader = read_json if name.endswith(".json") else read_yaml
    return reader(text, name, problems), problems


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        (".5", 0.5),
        ("1.", 1.0),
        ("-.inf", -math.inf),
        ("true", True),
        ("FALSE", False),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("null", None),
        ("~", None),
        ("", None),
        ("012", 12),
        ("0x1F", 31),
        ("0o17", 15),
        ("01:00:00", "01:00:00"),
        ("2026-01-01", "2026-01-01"),
        ("1_000", "1_000"),
        ('"1"', "1"),
        ("!!str 1", "1"),
        ("=", "="),
    ],
)
def test_scalars_follow_yaml_1_2(text, expected):
    found = value_of(text)
    assert found == expected
    assert type(found) is type(expected)


def test_every_key_path_knows_its_line():
    node, _ = read("a:\n  b: 1\n  c:\n    - 1\n    - d: 2\n")
    assert origins(node) == {
        ("a",): "my.yaml:1",
        ("a", "b"): "my.yaml:2",
        ("a", "c"): "my.yaml:3",
        ("a", "c", 0): "my.yaml:4",
        ("a", "c", 1): "my.yaml:5",
        ("a", "c", 1, "d"): "my.yaml:5",
    }


def test_json_with_tabs_and_colons_on_the_next_line_knows_its_lines():
    node, problems = read('{\n\t"a"\n\t:\t{"b": "x\ty\\ud83d\\ude00"},\n\t"c": [1, {"d": 1e-3}, []]\n}', "my.json")
    assert not problems
    assert plain(node) == {"a": {"b": "x\ty😀"}, "c": [1, {"d": 1e-3}, []]}
    assert origins(node)[("a", "b")] == "my.json:3"
    assert origins(node)[("c", 1, "d")] == "my.json:4"


@pytest.mark.parametrize("name", ["my.yaml", "my.json"])
def test_a_key_written_twice_is_a_problem_that_names_both_lines(name):
    _, problems = read('{"a": 1,\n "b": 2,\n "a": 3}', name)
    assert [str(problem) for problem in problems] == [f"{name}:3: a: written twice, first at {name}:1"]


@pytest.mark.parametrize("text", ["1: a", "null: a", "true: a", "1.5: a", "? [a]\n: b", "<<: {a: 1}"])
def test_keys_that_are_not_text_are_problems(text):
    _, problems = read(text)
    assert len(problems) == 1
    assert problems[0].origin == "my.yaml:1"


def test_merge_keys_are_read_where_they_are_asked_for_and_know_their_lines():
    text = """\
a: &a {x: 1, y: {z: 2}}
b: &b {x: 3, w: 4}
c:
  <<: [*a, *b]
  y: 5
d: {"<<": 6, <<: *b, <<: *a}
"""
    problems = []
    node = read_yaml(text, "my.yaml", problems, merge_keys=True)
    assert not problems
    assert plain(node)["c"] == {"x": 1, "w": 4, "y": 5} == yaml.safe_load(text)["c"]
    assert plain(node)["d"] == {"x": 3, "w": 4, "y": {"z": 2}, "<<": 6}, "in quotes it is a key like others"
    where = origins(node)
    assert (where["c", "x"], where["c", "w"], where["c", "y"]) == ("my.yaml:1", "my.yaml:2", "my.yaml:5")


@pytest.mark.parametrize("text", ["a: {<<: 1}", "a: {<<: [{b: 1}, 2]}"])
def test_a_merge_key_takes_mappings(text):
    problems = []
    read_yaml(text, "my.yaml", problems, merge_keys=True)
    assert [str(problem) for problem in problems] == ["my.yaml:1: a: << takes a mapping, or a list of them"]


def test_a_mapping_that_merges_itself_is_refused():
    with pytest.raises(RecipeError, match="an alias that contains itself"):
        read_yaml("a: &a {<<: *a}", "my.yaml", [], merge_keys=True)


@pytest.mark.parametrize("text", ["x: !!python/object:os.system a", "x: !mine {a: 1}", "x: !!int a", "x: 1e400"])
def test_tags_and_numbers_that_cannot_be_read_are_problems(text):
    assert len(read(text)[1]) == 1


@pytest.mark.parametrize(
    ("text", "line"),
    [("a: 1\nb: [1,\n", 3), ("a: 1\n\tb: 2\n", 2), ("a: b: c\n", 1), ("a: *nowhere", 1), ("a: 1\n---\nb: 2", 2)],
)
def test_a_syntax_error_says_file_and_line(text, line):
    with pytest.raises(RecipeError, match=f"^my.yaml:{line}: not valid YAML"):
        read(text)


def test_an_unprintable_character_says_its_line():
    with pytest.raises(RecipeError, match=r"^my\.yaml:2: not valid YAML"):
        read("a: 1\nb: \x01\n")


def test_a_json_syntax_error_says_file_and_line():
    with pytest.raises(RecipeError, match=r"^my.json:2: not valid JSON"):
        read('{"a": 1,\n}', "my.json")


@pytest.mark.parametrize("text", ["a: &x [*x]", "[" * 5000, "a: " + "9" * 5000])
def test_hostile_yaml_ends_in_an_error_for_people(text):
    with pytest.raises(RecipeError):
        _, problems = read(text)
        raise RecipeError(problems)


def test_an_alias_that_contains_itself_is_refused():
    with pytest.raises(RecipeError, match=r"^my\.yaml:1: a\.0: an alias that contains itself"):
        read("a: &x [*x]")


def test_aliases_that_multiply_are_refused():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(RecipeError, match="more than 100,000 values"):
        read("\n".join(lines))


def test_an_alias_may_be_used_twice():
    assert plain(read("a: &x {b: 1}\nc: *x\n")[0]) == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"# nothing\n", "is empty"),
        (b"- a\n- b\n", "holds a list"),
        (b"hello", "holds a single value"),
        (b"a: \xff\xfe", "not UTF-8"),
    ],
)
def test_files_that_are_no_recipe_say_why(tmp_path, content, words):
    path = tmp_path / "my.yaml"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=words) as caught:
        read_location(locate(path, tmp_path), [])
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("name", "content"), [("my.yaml", b"seed: 1\n"), ("my.json", b'{"seed": 1}')])
def test_a_byte_order_mark_is_not_part_of_the_recipe(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + content)
    assert plain(read_location(locate(path, tmp_path), [])) == {"seed": 1}


@given(st.text())
def test_any_text_reads_or_fails_with_a_recipe_error(text):
    for name in ("my.yaml", "my.json"):
        try:
            read(text, name)
        except RecipeError as error:
            assert str(error).startswith(name)
