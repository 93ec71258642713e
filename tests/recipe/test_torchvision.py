"""Networks of torchvision in a recipe; most tests use a small package of that name, because the real one is large."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

from isoscale.errors import UserError
from isoscale.recipe.components import check, instantiate
from isoscale.recipe.load import load_recipe
from isoscale.recipe.names import class_path

MODELS = """
from urllib.error import URLError
from torch import nn
from torchvision.models import resnet

class Small(nn.Module):
    def __init__(self, num_classes=1000):
        super().__init__()
        self.fc = nn.Linear(4, num_classes)

def resnet18(*, weights=None, progress=True, **arguments):
    if weights == "DEFAULT":
        raise URLError("Name or service not known")
    if weights is not None:
        raise KeyError(weights)
    return Small(**arguments)

def vgg11(*, weights=None, progress=True, **arguments):
    return Small(**arguments)
"""
RESNET = "def resnet18(): pass\ndef resnet34(): pass\nclass ResNet: pass\n"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a package called torchvision first on the path, and forgets every other one."""

    def make(start: str = "", models: str = MODELS) -> None:
        folder = tmp_path / "torchvision" / "models"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").write_text(start)
        (folder / "__init__.py").write_text(models)
        (folder / "resnet.py").write_text(RESNET)

    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]


def problems(spec) -> list[str]:
    return [str(problem) for problem in check(spec, ("task", "model"))]


def test_a_network_is_named_alone_or_with_its_arguments(package):
    package()
    assert instantiate("torchvision:vgg11").fc.out_features == 1000
    spec = {"class": "torchvision:resnet18", "num_classes": 10, "weights": None}
    assert problems(spec) == []
    assert instantiate(spec).fc.out_features == 10
    assert instantiate({**spec, "class": "torchvision.models.resnet18"}).fc.out_features == 10


def test_a_recipe_names_it_and_overrides_change_its_arguments(package, tmp_path: Path):
    package()
    (tmp_path / "mine.yaml").write_text("extends: images/digits\ntask: {model: torchvision:resnet18}\n")
    loaded = load_recipe(tmp_path / "mine.yaml", ["task.model={class: torchvision:vgg11, num_classes: 3}"])
    assert loaded.recipe.task.model == {"class": "torchvision:vgg11", "num_classes": 3}
    load_recipe(tmp_path / "mine.yaml", check_components=True)


def test_both_spellings_are_the_same_class():
    assert class_path("torchvision:resnet18") == class_path("torchvision.models:resnet18")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torchvision:resnet81", 'torchvision.models has no "resnet81"; did you mean "torchvision:resnet18"?'),
        ("torchvision:resnet", 'is a module, not a class or function; did you mean "torchvision:resnet'),
        ("torchvision.models.resnet81", 'did you mean "resnet18"?'),
    ],
)
def test_an_unknown_name_leads_to_the_nearest(package, name, words):
    package()
    (problem,) = problems(name)
    assert words in problem


class Missing:
    """Answers for torchvision, where it is installed, that it is not."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def test_where_it_is_not_installed_the_extra_is_named(package, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    (problem,) = problems("torchvision:resnet18")
    assert problem.startswith("task.model: torchvision is not installed: pip install 'isoscale[vision]'")
    assert "resnet, need none of it" in problem


def test_where_something_that_it_needs_is_missing_that_is_named(package):
    package("import no_such_imaging_library")
    (problem,) = problems("torchvision:resnet18")
    assert "no_such_imaging_library" in problem and "isoscale[vision]" in problem


def test_where_it_was_built_for_another_torch_both_versions_are_named(package):
    package("raise RuntimeError('operator torchvision::nms does not exist')")
    (problem,) = problems({"class": "torchvision:resnet18", "num_classes": 10})
    assert problem.startswith("task.model.class: torchvision does not work here")
    for words in ("operator torchvision::nms does not exist", f"torch {torch.__version__}", "resnet, need none of it"):
        assert words in problem


def test_weights_that_cannot_be_fetched_say_how_to_start_from_a_file(package):
    package()
    with pytest.raises(UserError) as caught:
        instantiate({"class": "torchvision:resnet18", "weights": "DEFAULT"})
    for words in ("the weights DEFAULT of torchvision:resnet18", "Name or service", "task.init_from=FILE"):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"weights": "IMAGENET9"}, "nothing called 'IMAGENET9'"), ({"num_clases": 3}, "num_clases")],
)
def test_arguments_that_do_not_fit_are_an_error_of_the_recipe(package, arguments, words):
    package()
    with pytest.raises(UserError, match="torchvision cannot make torchvision:resnet18 with") as caught:
        instantiate({"class": "torchvision:resnet18", **arguments})
    assert words in str(caught.value)


def test_the_real_networks_have_the_names_of_our_own():
    try:
        importlib.import_module("torchvision")
    except Exception as error:
        pytest.skip(f"needs a torchvision that fits this torch: {error}")
    ours = instantiate({"class": "resnet", "depth": 18, "stem": "imagenet", "num_classes": 7})
    theirs = instantiate({"class": "torchvision:resnet18", "num_classes": 7})
    images = torch.randn(2, 3, 64, 64)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours.eval()(images), theirs.eval()(images), rtol=1e-4, atol=1e-5)
    assert problems("torchvision:resnet81")[0].endswith('did you mean "torchvision:resnet18"?')
