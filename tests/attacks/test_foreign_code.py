"""A run or a file of weights that somebody else wrote names code: nothing of it runs, unless the user says so."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

import isoscale
from isoscale.cli.main import app
from isoscale.errors import UserError
from isoscale.recipe.load import load_recipe
from isoscale.recipe.trust import is_harmless
from isoscale.runs.export import load_task
from isoscale.science.atoms.use import calculator
from isoscale.study.scale.study import Question, begin
from isoscale.study.sweep.plan import plan
from tests.helpers import command, first_of, train

EVIL = """
import os, pathlib, torch
pathlib.Path(os.environ["MARKER"]).touch()
class Net(torch.nn.Linear):
    def __init__(self, wide=64):
        super().__init__(wide, 10)
"""
GOOD = EVIL.replace("pathlib.Path(os.environ", "str(os.environ").replace(".touch()", "")
LAYER = {"class": "torch.nn.Linear", "in_features": 64, "out_features": 10}
REFUSED = "--trust"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch."""
    recipe = {"extends": "images/digits", "task": {"model": LAYER}}
    return train(tmp_path_factory.mktemp("trained") / "run", recipe, train__epochs=1).path


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that an attack leaves behind; the current project is another folder beside it."""
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.syspath_prepend(tmp_path / "project")
    monkeypatch.setenv("MARKER", str(tmp_path / "marker"))
    return tmp_path / "marker"


Make = Callable[..., Path]


@pytest.fixture
def foreign(trained: Path, marker: Path) -> Make:
    """Makes the run of somebody else, with a recipe that was changed."""

    def make(change: Callable[[dict[str, Any]], Any], name: str = "foreign") -> Path:
        run = Path(name)
        shutil.copytree(trained, run, symlinks=True)
        values = yaml.safe_load((run / "recipe.yaml").read_text())
        change(values)
        (run / "recipe.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        return run

    return make


def system(marker: Path) -> dict[str, Any]:
    return {"class": "os.system", "command": f"touch {marker}"}


def in_task(spec: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda values: values["task"].update(model=spec)


COMMANDS = {
    "test": ["test", "foreign"],
    "predict": ["predict", "foreign", "--out", "predicted.npz"],
    "export": ["export", "foreign", "--out", "net.safetensors"],
    "export, as a program": ["export", "foreign", "--out", "net.pt2"],
    "report": ["report", "foreign"],
    "reproduce": ["reproduce", "foreign"],
    "train": ["train", "--run", "foreign", "train.epochs=2"],
    "train its recipe": ["train", "foreign/recipe.yaml"],
    "train what extends it": ["train", "own.yaml"],
    "train a few batches": ["train", "foreign/recipe.yaml", "--dev", "1"],
    "submit": ["submit", "--run", "foreign"],
    "submit its recipe": ["submit", "foreign/recipe.yaml", "--activate", "true"],
    "sweep": ["sweep", "foreign/recipe.yaml", "seed=0,1"],
    "scale": ["scale", "foreign/recipe.yaml", "--ranks", "1"],
    "recipe model": ["recipe", "model", "foreign", "train.epochs=2"],
    "recipe model, of a file": ["recipe", "model", "foreign/recipe.yaml"],
    "data info": ["data", "info", "foreign/recipe.yaml"],
}


@pytest.mark.slow
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_no_command_builds_what_a_foreign_run_names(foreign: Make, marker: Path, words: list[str]) -> None:
    foreign(in_task(system(marker)))
    Path("own.yaml").write_text("extends: foreign/recipe.yaml\nseed: 3\n")
    with pytest.raises(UserError, match=REFUSED) as caught:
        app(words, standalone_mode=False)
    assert '"os.system"' in str(caught.value) and "foreign" in str(caught.value) and "task.model" in str(caught.value)
    assert not marker.exists()
    assert not list(Path().glob("runs/*"))


LOOKING = {
    "recipe check": ["recipe", "check", "foreign/recipe.yaml"],
    "recipe show": ["recipe", "show", "foreign/recipe.yaml"],
    "submit --dry-run": ["submit", "--run", "foreign", "--dry-run"],
    "submit --dry-run, its recipe": ["submit", "foreign/recipe.yaml", "--dry-run"],
    "sweep --dry-run": ["sweep", "foreign/recipe.yaml", "seed=0,1", "--dry-run"],
    "scale --dry-run": ["scale", "foreign/recipe.yaml", "--ranks", "1", "--slurm", "--dry-run"],
    "runs show": ["runs", "show", "foreign"],
    "runs list": ["runs", "list", "."],
    "compare": ["compare", "foreign", "other"],
    "report --no-figures": ["report", "foreign", "--no-figures"],
    "recipe model": ["recipe", "model", "foreign"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["os.system", "foreign.evil.Net", "evil.Net"])
@pytest.mark.parametrize("words", LOOKING.values(), ids=LOOKING)
def test_to_look_imports_and_builds_nothing(foreign: Make, marker: Path, name: str, words: list[str]) -> None:
    other = foreign(in_task({"class": name}), "other")
    run = foreign(in_task({"class": name}))
    for folder in (other, run, Path()):  # even what lies in the project is not run by a check
        (folder / "evil.py").write_text(EVIL)
    app(words, standalone_mode=False)
    assert not marker.exists()


def attacks(marker: Path) -> dict[str, Any]:
    touch = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    return {
        "os.system": system(marker),
        "a name alone": "evil_module.Net",
        "subprocess.run": {"class": "subprocess.run", "args": ["touch", str(marker)]},
        "subprocess:Popen": {"class": "subprocess:Popen", "args": ["touch", str(marker)]},
        "builtins.exec": {"class": "builtins.exec", "source": touch},
        "builtins.eval": {"class": "builtins.eval", "source": touch},
        "timeit.timeit": {"class": "timeit.timeit", "stmt": touch, "number": 1},
        "runpy.run_path": {"class": "runpy.run_path", "path_name": "foreign/evil.py"},
        "importlib": {"class": "importlib.import_module", "name": "foreign.evil"},
        "functools.partial": {"class": "functools.partial", "func": system(marker)},
        "torch.server.load": {
            "class": "torch.server.load",
            "repo_or_dir": "foreign",
            "model": "net",
            "source": "local",
        },
        "torch.load": {"class": "torch.load", "f": "foreign/evil.pt", "weights_only": False},
        "numpy": {"class": "numpy.load", "file": "foreign/evil.pt", "allow_pickle": True},
        "cpp_extension": {"class": "torch.utils.cpp_extension.load_inline", "name": "a", "cpp_sources": ""},
        "through our modules": {
            "class": "isoscale.runs.git:subprocess.run",
            "args": ["touch", str(marker)],
        },
        "a function of ours": {"class": "isoscale.recipe.components.instantiate", "spec": "foreign.evil.Net"},
        "a git of ours": {"class": "isoscale.runs.git._ask", "arguments": "--help"},
        "through torch": {"class": "torch.nn.modules.module:warnings.sys.exit"},
        "functions of torch": {"class": "torch.nn.modules.module:functools.partial", "func": system(marker)},
        "in its folder": {"class": "foreign.evil.Net"},
        "a package in its folder": {"class": "foreign.pack.inside.Net"},
        "through our project": {"class": "mine:os.system", "command": f"touch {marker}"},
        "nested": {"class": "mlp", "widths": [64, {"class": "mlp", "widths": [system(marker)]}]},
        "another key": {"_target_": "os.system", "command": f"touch {marker}"},
        "a third key": {"class_path": "os.system", "init_args": {"command": f"touch {marker}"}},
    }


ATTACKS = list(attacks(Path()))


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_name_leads_to_code(foreign: Make, marker: Path, attack: str) -> None:
    run = foreign(in_task(attacks(marker)[attack]))
    (run / "pack").mkdir()
    Path("mine.py").write_text("import os\n")
    for file in ("evil.py", "hubconf.py", "pack/__init__.py"):
        (run / file).write_text(EVIL)
    (run / "pack" / "inside.py").write_text(GOOD)
    torch.save(Touch(), run / "evil.pt")
    with pytest.raises(UserError, match=r"--trust|no module"):
        isoscale.Run(run).task()
    assert not marker.exists()


class Touch:
    """Leaves its marker when a pickle of it is read."""

    def __reduce__(self) -> Any:
        return os.system, (f"touch {os.environ['MARKER']}",)


PLACES: dict[str, Callable[[dict[str, Any], Any], Any]] = {
    "task": lambda values, spec: values.update(task=spec),
    "model": lambda values, spec: values["task"].update(model=spec),
    "loss": lambda values, spec: values["task"].update(loss=spec),
    "metrics": lambda values, spec: values["task"].update(metrics={"mine": spec}),
    "callbacks": lambda values, spec: values["task"].update(callbacks=[spec]),
    "data": lambda values, spec: values.update(data=spec),
    "dataset": lambda values, spec: values["data"].update(train=[{"a": [spec]}]),
    "transforms": lambda values, spec: values["data"].update(transforms=[spec]),
    "loggers": lambda values, spec: values["observe"].update(loggers=[spec]),
    "optimizer": lambda values, spec: values["optimizer"].update(betas=spec),
}


@pytest.mark.parametrize("place", PLACES)
def test_no_place_in_a_recipe_is_forgotten(foreign: Make, marker: Path, place: str) -> None:
    run = foreign(lambda values: PLACES[place](values, system(marker)))
    for use in (isoscale.test, isoscale.predict, isoscale.figures):
        with pytest.raises(UserError, match=REFUSED):
            use(run)
    assert not marker.exists()


@pytest.mark.parametrize("place", ["model", "transforms", "loggers"])
def test_a_name_alone_is_no_way_in(foreign: Make, marker: Path, place: str) -> None:
    run = foreign(lambda values: PLACES[place](values, "foreign.evil.Net"))
    (run / "evil.py").write_text(EVIL)
    with pytest.raises(UserError, match=REFUSED):
        isoscale.train(run=run, **{"train.epochs": 2})
    assert not marker.exists()


def test_code_that_came_with_a_run_is_no_code_of_the_project(foreign: Make, marker: Path) -> None:
    Path("shared").mkdir()
    run = foreign(in_task({"class": "shared.evil.Net"}), "shared/run")
    Path("shared/evil.py").write_text(EVIL)
    with pytest.raises(UserError, match=REFUSED):
        isoscale.Run(run).task()
    assert not marker.exists()


def test_to_stand_in_a_foreign_run_makes_it_no_project(
    foreign: Make, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = foreign(in_task({"class": "standing_evil.Net"}))
    (run / "standing_evil.py").write_text(EVIL)
    monkeypatch.chdir(run)
    with pytest.raises(UserError, match=REFUSED):
        isoscale.Run(".").task()
    assert not marker.exists()


def test_what_the_user_trusts_is_built(foreign: Make, marker: Path) -> None:
    run = foreign(in_task({"class": "trusted.Net"}))
    outside = marker.parent / "outside"
    outside.mkdir()
    (outside / "trusted.py").write_text(EVIL)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(outside)
        with pytest.raises(UserError, match=REFUSED):
            app(["test", "foreign"], standalone_mode=False)
        assert not marker.exists()
        isoscale.Run(run, trust=True).task()
        app(["export", "foreign", "--out", "net.safetensors", "--trust"], standalone_mode=False)
        assert marker.exists()
        app(["train", "--run", "foreign", "train.epochs=2", "observe.level=error", "--trust"], standalone_mode=False)
        isoscale.Run(run).task()  # who has trained it has made it one's own


def test_code_of_the_current_project_and_layers_of_torch_need_no_word(foreign: Make) -> None:
    Path("code_here.py").write_text(GOOD)
    run = foreign(in_task({"class": "code_here.Net"}))
    assert type(isoscale.Run(run).model()).__name__ == "Net"
    layer = foreign(in_task(LAYER), "layer")
    assert type(isoscale.Run(layer).model()) is torch.nn.Linear


@pytest.mark.slow
def test_a_run_of_ones_own_needs_no_word_wherever_it_is(marker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("own_code.py").write_text(GOOD)
    monkeypatch.syspath_prepend(Path.cwd())
    task = {"class": "classifier", "model": {"class": "own_code.Net"}}
    run = train(Path("run"), {"extends": "images/digits", "task": task}, train__epochs=1)
    isoscale.export(run, marker.parent / "net.safetensors")
    elsewhere = marker.parent / "elsewhere"
    elsewhere.mkdir()
    run.path.rename(elsewhere / "moved")
    monkeypatch.chdir(elsewhere)
    for words in (["test"], ["predict"], ["report"], ["export", "--out", "a.pt2"], ["reproduce"]):
        app([words[0], "moved", *words[1:]], standalone_mode=False)
    isoscale.train(run="moved", **{"train.epochs": 2})
    load_task(marker.parent / "net.safetensors")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(elsewhere / "another user"))
    with pytest.raises(UserError, match=REFUSED):
        isoscale.Run("moved").task()
    with pytest.raises(UserError, match=REFUSED):
        load_task(marker.parent / "net.safetensors")
    load_task(marker.parent / "net.safetensors", trust=True)


@pytest.mark.full
def test_without_a_secret_one_trains_all_the_same(marker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (marker.parent / "library").mkdir()
    (marker.parent / "library" / "library_net.py").write_text(GOOD)
    monkeypatch.syspath_prepend(marker.parent / "library")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/nowhere")
    Path("a.yaml").write_text("extends: images/digits\ntask: {model: {class: library_net.Net}}\ntrain: {steps: 2}\n")
    train(Path("run"), "a.yaml")
    with pytest.raises(UserError, match=REFUSED):  # nothing shows that it is one's own
        isoscale.Run("run").task()
    isoscale.Run("run", trust=True).task()
    words = command("sweep", "a.yaml", "seed=0,1", "--run", "sweep")
    path = os.pathsep.join([str(marker.parent / "library"), os.environ.get("PYTHONPATH", "")])
    swept = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert "2 of 2 done" in swept.stdout, swept.stdout + swept.stderr


def test_a_seal_is_not_that_of_another_recipe(trained: Path, marker: Path) -> None:
    shutil.copytree(trained, "run", symlinks=True)
    recipe = Path("run/recipe.yaml")
    own = recipe.read_text()
    assert "# sealed: " in own
    isoscale.Run("run").task()
    for changed in (
        own.replace("class: classifier", "class: os.system"),
        own + "task: {class: os.system}\n",
        own.replace("# sealed: ", "# sealed: é"),
    ):
        recipe.write_text(changed.replace("class: torch.nn.Linear", "class: subprocess.run"))
        with pytest.raises(UserError):
            isoscale.Run("run").task()
    recipe.write_text(own.rpartition("# sealed")[0])
    isoscale.Run("run").task()  # of another user, or from before there were seals: nothing but our own components


def with_recipe(path: Path, task: dict[str, Any]) -> Path:
    recipe = json.dumps({"task": task, "data": {"class": "digits"}})
    save_file({"weight": torch.ones(1)}, path, {"recipe": recipe, "seal": "00", "isoscale": "0"})
    return path


@pytest.mark.parametrize("use", [load_task, calculator])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_file_of_weights_builds_nothing(marker: Path, attack: str, use: Callable[..., Any]) -> None:
    Path("foreign").mkdir()
    for file in ("evil.py", "hubconf.py"):
        (Path("foreign") / file).write_text(EVIL)
    Path("mine.py").write_text("import os\n")
    spec = attacks(marker)[attack]
    tasks = [{"class": "supervised", "model": spec}, *([spec] if isinstance(spec, dict) else [])]
    for task in tasks:
        path = with_recipe(Path("foreign/net.safetensors"), task)
        with pytest.raises(UserError, match=r"--trust|no module"):
            use(path)
    assert not marker.exists()


def test_a_file_that_is_trusted_is_built(marker: Path) -> None:
    path = with_recipe(Path("net.safetensors"), system(marker))
    with pytest.raises(AttributeError):  # what comes back is no task
        calculator(path, trust=True)
    assert marker.exists()


@pytest.mark.parametrize("where", ["recipe", "points", "changes"])
def test_a_foreign_sweep_trains_nothing(marker: Path, where: str) -> None:
    sweep = plan("images/digits", ["seed=0,1"], [], check_components=False).write(Path("foreign"))
    record = dict(sweep.record)
    if where == "recipe":
        text = (sweep.path / "recipe.yaml").read_text()
        (sweep.path / "recipe.yaml").write_text(text.replace("class: classifier", "class: os.system"))
    elif where == "points":
        record["points"] = [{**record["points"][0], "values": {"observe.loggers": [system(marker)]}}]
    else:
        record["changes"] = {"observe.loggers": f"observe.loggers=[{json.dumps(system(marker))}]"}
    (sweep.path / "sweep.json").write_text(json.dumps(record))
    shutil.rmtree(sweep.folder(sweep.points[0]))  # which would be prepared anew
    with pytest.raises(UserError, match=REFUSED):
        app(["sweep", "--run", "foreign"], standalone_mode=False)
    assert not marker.exists() and not sweep.folder(sweep.points[0]).exists()


def test_a_foreign_study_measures_nothing(marker: Path) -> None:
    study = begin(load_recipe("images/digits"), Question("strong", [1], 1, 2), Path("foreign"))
    study.recipe.write_text(study.recipe.read_text().replace("class: classifier", "class: os.system"))
    with pytest.raises(UserError, match=REFUSED):
        app(["scale", "--run", "foreign", "--measure", "1:1"], standalone_mode=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("activate", "touch $MARKER"),
        ("container", "podman:evil"),
        ("env", {"LD_PRELOAD": "evil.so"}),
        ("directives", ["--wrap=evil"]),
        ("modules", ["evil"]),
    ],
)
@pytest.mark.parametrize(
    "words",
    [
        ["submit", "--run", "foreign"],
        ["submit", "foreign/recipe.yaml"],
        ["sweep", "foreign/recipe.yaml", "seed=0,1", "--slurm"],
        ["scale", "foreign/recipe.yaml", "--ranks", "1", "--slurm"],
    ],
    ids=["submit", "submit anew", "sweep", "scale"],
)
def test_no_job_does_what_a_foreign_recipe_says(foreign: Make, words: list[str], key: str, value: Any) -> None:
    foreign(lambda values: values["launch"].update({key: value}))
    with pytest.raises(UserError, match=f"launch.{key}.*--trust"):
        app(words, standalone_mode=False)
    app([*words, "--dry-run"], standalone_mode=False)


def test_no_job_does_what_a_foreign_study_says(marker: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", "")
        study = begin(load_recipe("images/digits"), Question("strong", [1], 1, 2), Path("foreign"))
        values = json.loads((study.path / "scale.json").read_text())
        values["job"] = {"id": "1", "launch": {"activate": "evil"}}
        (study.path / "scale.json").write_text(json.dumps(values))
        with pytest.raises(UserError, match=r"launch.activate.*--trust"):
            app(["scale", "--run", "foreign"], standalone_mode=False)


def test_no_training_writes_where_a_foreign_run_says(foreign: Make, marker: Path) -> None:
    run = foreign(lambda values: values["observe"].update(log_file=str(marker)))
    with pytest.raises(UserError, match=r"observe.log_file.*--trust"):
        isoscale.train(run=run, **{"train.epochs": 2})
    isoscale.test(run)  # writes none
    assert not marker.exists()


@pytest.mark.parametrize("package", ["torchmetrics", "torchvision"])
def test_a_file_with_the_name_of_a_package_is_not_taken_for_it(
    marker: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for module in [module for module in sys.modules if module.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, module)
    Path(f"{package}.py").write_text(EVIL)
    Path("a.yaml").write_text(f"extends: images/digits\ntask: {{model: {package}.models.Net}}\n")
    with pytest.raises(UserError):
        app(["recipe", "check", "a.yaml"], standalone_mode=False)
    assert not marker.exists()


@pytest.fixture
def module(marker: Path) -> Iterator[Path]:
    path = Path("checked_only.py")
    path.write_text(EVIL + "class Deeper(Net):\n    pass\n")
    yield path


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("Net", {"wide": 64}, None),
        ("Deeper", {"wide": 64}, None),
        ("Net", {"wid": 64}, 'Net takes no such argument; did you mean "wide"'),
        ("Deeper", {"wid": 64}, 'Deeper takes no such argument; did you mean "wide"'),
        ("Nett", {}, 'checked_only has no "Nett"; did you mean "Net"'),
    ],
)
def test_a_check_knows_arguments_without_running_anything(
    module: Path, marker: Path, name: str, arguments: dict[str, Any], message: str | None
) -> None:
    Path("a.yaml").write_text(
        json.dumps({"extends": "images/digits", "task": {"model": {"class": f"checked_only.{name}", **arguments}}})
    )
    if message is None:
        app(["recipe", "check", "a.yaml"], standalone_mode=False)
    else:
        with pytest.raises(UserError, match=message):
            app(["recipe", "check", "a.yaml"], standalone_mode=False)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "expected"),
    first_of(
        [
            ("mlp", True),
            ("isoscale.science.models.MLP", True),
            ("isoscale.science.images:Classifier", True),
            ("isoscale.data.file_sources.Files", True),
            ("torch.nn.Linear", True),
            ("torch.nn.modules.loss.MSELoss", True),
            ("torchmetrics.classification.MulticlassAccuracy", True),
            ("torchmetrics.MeanMetric", True),
            ("torch.nn.functional.mse_loss", True),
            ("torch.nn.functional:torch.load", False),
            ("torch.nn.functional:importlib.import_module", False),
            ("torch.nn:Module.load_state_dict", False),
            ("torch.load", False),
            ("torch.jit.load", False),
            ("isoscale.train", False),
            ("isoscale:Run", False),
            ("isoscale.runs.export.load_task", False),
            ("isoscale.data.tools.downloads.Fetching", False),
            ("isoscale.recipe.components:os.system", False),
            ("torchmetrics.text.bert.BERTScore", False),
        ],
        ("torch.nn.Linear", True),
        ("isoscale.train", False),
    ),
)
def test_harmless_is_what_only_computes(name: str, expected: bool) -> None:
    assert is_harmless(name) is expected
