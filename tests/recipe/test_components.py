import pytest

from isoscale.engine.config import Optimizer
from isoscale.errors import UserError
from isoscale.recipe.check import check_optimizer, check_recipe
from isoscale.recipe.components import check, data_spec, instantiate, resolve, task_spec
from isoscale.recipe.load import load_recipe
from isoscale.recipe.names import OF_ALL_SCIENCES
from isoscale.recipe.problems import RecipeError
from tests.recipe import things

THINGS = "tests.recipe.things"


def texts(problems):
    return [str(problem) for problem in problems]


@pytest.mark.parametrize("name", [f"{THINGS}.Net", f"{THINGS}:Net"])
def test_class_paths_resolve_with_a_point_or_a_colon(name):
    assert resolve(name) is things.Net


def test_nested_classes_resolve_after_a_colon():
    assert resolve(f"{THINGS}:Outer.Inner") is things.Outer.Inner


def test_short_names_resolve_in_any_case(monkeypatch):
    monkeypatch.setitem(OF_ALL_SCIENCES, "net", f"{THINGS}.Net")
    assert resolve("Net") is things.Net


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mpl", 'there is no component "mpl".*did you mean "mlp"'),
        ("", "there is no component"),
        (".Net", "there is no component"),
        ("no_such_package.Net", 'there is no module "no_such_package"'),
        (f"{THINGS}.deeper.Net", f'there is no module "{THINGS}.deeper"'),
        (f"{THINGS}.Nett", 'has no "Nett"; did you mean "Net"'),
        (f"{THINGS}.number", "is a int, not a class"),
        ("..Net", "importing . failed"),
    ],
)
def test_names_that_lead_nowhere_say_where_they_end(name, words):
    with pytest.raises(UserError, match=words):
        resolve(name)


def test_classes_in_the_working_directory_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    (tmp_path / "my_own_module.py").write_text("class Mine:\n    pass\n")
    assert resolve("my_own_module.Mine").__name__ == "Mine"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import not_installed_at_all", "No module named 'not_installed_at_all'"),
        ("x = 1 / 0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_an_error_inside_the_users_module_is_shown(tmp_path, monkeypatch, code, words):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_broken_module.py").write_text(code)
    with pytest.raises(UserError, match=f"importing my_broken_module failed: .*{words}"):
        resolve("my_broken_module.Mine")


def test_good_components_have_no_problems():
    net = {"class": f"{THINGS}.Net", "widths": [1, 2], "dropout": 0, "betas": [0.9, 0.999], "head": None}
    assert check({**net, "head": {**net}}, ("model",)) == []
    assert check({"class": f"{THINGS}.Anything", "x": 1, "y": [net]}, ()) == []
    assert check({"class": f"{THINGS}.Unresolvable", "value": 3}, ()) == []
    assert check({"class": f"{THINGS}.Net", "widths": {"class": f"{THINGS}.Scale"}}, ()) == []
    assert check(f"{THINGS}.Scale", ()) == []


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, 'm: Net needs the argument "widths"'),
        ({"width": [1]}, 'm.width: Net takes no such argument; did you mean "widths"?'),
        ({"widths": [1], "zzz": 1}, "m.zzz: Net takes no such argument"),
        ({"widths": "1"}, 'm.widths: expected a list, found "1"'),
        ({"widths": [1, "a"]}, 'm.widths.1: expected a whole number, found "a"'),
        ({"widths": [1.0]}, "m.widths.0: expected a whole number, found 1.0"),
        ({"widths": [True]}, "m.widths.0: expected a whole number, found true"),
        ({"widths": [1], "dropout": "0.1"}, 'm.dropout: expected a number, found "0.1"'),
        (
            {"widths": [1], "activation": "rellu"},
            'm.activation: expected relu or tanh, found "rellu"; did you mean "relu"?',
        ),
        ({"widths": [1], "head": {"class": f"{THINGS}.Net"}}, 'm.head: Net needs the argument "widths"'),
        ({"widths": [1], "head": {"a": [{"class": "mpl"}]}}, "m.head.a.0.class: there is no component"),
        ({"widths": [1], "head": {"class": 3}}, "m.head.class: expected the name of a class, found 3"),
    ],
)
def test_an_argument_that_does_not_fit_is_one_problem(arguments, expected):
    (problem,) = texts(check({"class": f"{THINGS}.Net", **arguments}, ("m",)))
    assert problem.startswith(expected)


def test_what_the_engine_provides_is_neither_missing_nor_allowed():
    spec = {"class": f"{THINGS}.Science"}
    assert check(spec, (), frozenset({"model"})) == []
    (problem,) = texts(check({**spec, "model": 1}, (), frozenset({"model"})))
    assert problem == "model: isoscale supplies this argument itself; leave it out"


@pytest.mark.parametrize("spec", [3, None, [], {}, {"widths": [1]}])
def test_what_is_no_component_says_what_one_is(spec):
    (problem,) = texts(check(spec, ("task", "model")))
    assert problem.startswith("task.model: expected a component")


def test_components_are_built_depth_first_in_lists_and_mappings():
    scale = {"class": f"{THINGS}.Scale", "by": 2}
    built = instantiate({"class": f"{THINGS}.Science", "parts": {"a": [scale, 1], "b": {"c": scale}}}, model="given")
    assert built.model == "given"
    assert isinstance(built.parts["a"][0], things.Scale)
    assert built.parts["a"][1] == 1
    assert built.parts["b"]["c"].by == 2
    assert isinstance(instantiate(f"{THINGS}.Scale"), things.Scale)


def test_an_error_while_building_says_which_component():
    with pytest.raises(TypeError) as caught:
        instantiate({"class": f"{THINGS}.Net"})
    assert caught.value.__notes__ == [f"while building {THINGS}.Net from the recipe"]


def recipe_with(**sections):
    task = {"class": f"{THINGS}.Science", "model": {"class": f"{THINGS}.Net", "widths": [1]}}
    data = {"class": f"{THINGS}.Samples", "path": "x", "batch_size": 4, "transforms": [f"{THINGS}.Scale"]}
    return {"task": task | sections.pop("task", {}), "data": data | sections.pop("data", {}), **sections}


def test_sections_become_components_without_the_settings_of_the_engine():
    recipe = load_recipe(recipe_with(task={"model": f"{THINGS}.Anything", "loss": "mae"})).recipe
    assert task_spec(recipe.task) == {
        "class": f"{THINGS}.Science",
        "loss": "mae",
        "model": {"class": f"{THINGS}.Anything"},
    }
    assert data_spec(recipe.data) == {"class": f"{THINGS}.Samples", "path": "x"}
    assert isinstance(instantiate(task_spec(recipe.task)).model, things.Anything)


def test_a_recipe_whose_components_fit_passes():
    loaded = load_recipe(recipe_with(), check_components=True)
    check_recipe(load_recipe(recipe_with()))
    assert loaded.values == load_recipe(recipe_with()).values
    task, data = instantiate(task_spec(loaded.recipe.task)), instantiate(data_spec(loaded.recipe.data))
    assert isinstance(task, things.Science) and isinstance(task.model, things.Net)
    assert isinstance(data, things.Samples)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"data": {"transforms": [f"{THINGS}.Scale", "flaten"]}}, "data.transforms.1: there is no component"),
        ({"data": {"transforms": [{"by": 1}]}}, "data.transforms.0: expected a component"),
        ({"data": {"batchsize": 3}}, 'data.batchsize: Samples takes no such argument; did you mean "batch_size"?'),
        ({"task": {"model": 5}}, "task.model: expected a component"),
        ({"task": {"parts": [{"class": "nowhere.X"}]}}, 'task.parts.0.class: there is no module "nowhere"'),
        ({"task": {"model": None}}, 'task: Science needs the argument "model"'),
        ({"optimizer": {"name": "adamm"}}, 'optimizer.name: torch has no optimizer "adamm"'),
    ],
)
def test_component_problems_are_the_same_while_loading_and_afterwards(sections, expected):
    source = recipe_with(**sections)
    with pytest.raises(RecipeError) as while_loading:
        load_recipe(source, check_components=True)
    with pytest.raises(RecipeError) as afterwards:
        check_recipe(load_recipe(source))
    assert str(while_loading.value) == str(afterwards.value)
    assert str(while_loading.value).startswith(f"Python call: {expected}")


def test_a_misspelt_class_key_is_the_only_problem_of_its_section(monkeypatch):
    monkeypatch.setitem(OF_ALL_SCIENCES, "digits", f"{THINGS}.Net")
    source = recipe_with()
    source["data"]["clas"] = source["data"].pop("class")
    with pytest.raises(RecipeError) as caught:
        load_recipe(source, check_components=True)
    (problem,) = caught.value.problems
    assert problem.path == ("data", "clas")
    assert problem.suggestion == "class"


@pytest.mark.parametrize(
    "section",
    [
        {"name": "Adam", "betas": [0.9, 0.99]},
        {"name": "sgd", "momentum": 0.9, "nesterov": True, "maximize": False},
        {"name": "muon"},
        {},
    ],
)
def test_optimizers_of_torch_are_accepted_in_any_case(section):
    assert check_optimizer(Optimizer(**section)) == []


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"name": "lbfgs"}, "optimizer.name: LBFGS evaluates the loss several times in one step (a closure)"),
        ({"name": "SparseAdam"}, "optimizer.name: SparseAdam takes sparse gradients only"),
        ({"name": "optimizer"}, 'torch has no optimizer "optimizer"'),
        ({"name": "lr_scheduler"}, "torch has no optimizer"),
        ({"name": "adamm"}, 'did you mean "adam"?'),
        ({"name": "sgd", "momentun": 0.9}, 'optimizer.momentun: SGD takes no such argument; did you mean "momentum"?'),
        ({"name": "sgd", "momentum": "x"}, 'optimizer.momentum: expected a number, found "x"'),
        ({"fused": True}, "optimizer.fused: isoscale decides this"),
        ({"foreach": False}, "optimizer.foreach: isoscale decides this"),
        ({"capturable": True}, "optimizer.capturable: isoscale decides this"),
        ({"differentiable": True}, "optimizer.differentiable: isoscale decides this"),
        ({"params": []}, "optimizer.params: isoscale supplies this"),
    ],
)
def test_optimizers_that_cannot_be_used_say_why(section, words):
    (problem,) = texts(check_optimizer(Optimizer(**section)))
    assert words in problem
