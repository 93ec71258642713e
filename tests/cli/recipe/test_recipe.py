import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from isoscale.cli.recipe.recipe import app
from isoscale.recipe.load import load_recipe
from isoscale.recipe.presets import preset_names
from isoscale.recipe.problems import RecipeError


def run(*arguments):
    result = CliRunner().invoke(app, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_list_names_each_preset_with_its_first_line():
    lines = {name: text for name, text in (line.split(maxsplit=1) for line in run("list").stdout.splitlines())}
    assert lines["images/digits"].startswith("Handwritten digits (8×8, 1,797 images, inside the package)")
    assert set(lines) == set(preset_names())


def test_show_prints_the_resolved_recipe_with_origins():
    assert (
        run("show", "images/digits", "train.epochs=3").stdout
        == load_recipe("images/digits", ["train.epochs=3"]).to_yaml()
    )


def test_show_prints_the_values_as_json():
    values = json.loads(run("show", "images/digits", "~schedule", "--json").stdout)
    assert values == load_recipe("images/digits", ["~schedule"]).values


def test_check_says_ok(tmp_path):
    path = tmp_path / "mine.yaml"
    anything = "{class: tests.recipe.things.Anything}"
    path.write_text(f"task: {anything}\ndata: {anything}\n")
    assert run("check", str(path)).stdout == "mine: ok\n"


def test_check_raises_every_problem_of_schema_and_components():
    with pytest.raises(RecipeError) as caught:
        run("check", "images/digits", "task.class=no.Such", "optimiser.lr=1", "optimizer.fused=true")
    assert {"task.class", "optimiser", "optimizer.fused"} <= {
        ".".join(p.path) for p in caught.value.problems if len(p.path) < 3
    }
    assert caught.value.exit_code == 2


def structure_problems(value, schema, definitions):
    """Keys of `value` for which a closed section of the schema has no property."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if not isinstance(value, dict) or "properties" not in schema:
        return []
    properties = schema["properties"]
    unknown = [key for key in value if key not in properties and schema.get("additionalProperties") is False]
    known = [key for key in value if key in properties]
    return unknown + [bad for key in known for bad in structure_problems(value[key], properties[key], definitions)]


def test_the_schema_describes_keys_and_fits_the_preset():
    schema = json.loads(run("schema").stdout)
    definitions = schema["$defs"]
    assert "Passes over the training data" in definitions["Train"]["properties"]["epochs"]["description"]
    assert "class" in definitions["Task"]["properties"]
    values = load_recipe("images/digits").values
    assert structure_problems(values, schema, definitions) == []
    assert structure_problems({"train": {"epoch": 1}, "optimiser": 1}, schema, definitions) == ["optimiser", "epoch"]


def test_the_command_module_imports_nothing_heavy():
    code = "import sys, isoscale.cli.recipe.recipe; sys.exit(bool({'torch', 'pydantic', 'yaml'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
