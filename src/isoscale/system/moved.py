"""Modules under the names that they had once, so that people's imports and recipes go on working.

A table of old names, and a finder that Python asks last: whoever imports an old name gets the module itself, and a
warning that says its new name.
"""

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

Given = ParamSpec("Given")
Found = TypeVar("Found")

MOVED = {
    "breakdown": "runs.nan_report",
    "cli.apply": "cli.train.apply",
    "cli.compare": "cli.runs.runs",
    "cli.data_check": "cli.data.data",
    "cli.data_files": "cli.data.files",
    "cli.data_systems": "science.potentials.describe",
    "cli.data_words": "cli.data.words",
    "cli.doctor_host": "cli.doctor_findings",
    "cli.doctor_ranks": "cli.doctor_findings",
    "cli.export": "cli.train.train",
    "cli.failure": "cli.main",
    "cli.init": "cli.train.init",
    "cli.job_options": "cli.jobs.job_options",
    "cli.metric_tables": "cli.train.metric_tables",
    "cli.project": "cli.train.init",
    "cli.recipe_import": "cli.recipe.importing",
    "cli.report": "cli.runs.runs",
    "cli.reproduce": "cli.runs.runs",
    "cli.scale": "cli.studies.scale",
    "cli.send": "cli.runs.send",
    "cli.submit": "cli.jobs.submit",
    "cli.sweep": "cli.studies.sweep",
    "cli.tensorboard": "cli.runs.tensorboard",
    "data.column_source": "data.sources",
    "data.converters": "data.tools.convert",
    "data.describe": "data.tools.describe",
    "data.describe_files": "data.tools.describe",
    "data.device_feed": "data.feeds.device",
    "data.feed": "data.feeds.feed",
    "data.feeds.read_ahead": "data.feeds.host",
    "data.fetch": "data.tools.downloads",
    "data.formats.extras": "data.formats.checks",
    "data.formats.finding": "data.files",
    "data.formats.memory": "data.formats.mapped",
    "data.formats.npz": "data.formats.npy",
    "data.formats.raw": "data.formats.npy",
    "data.formats.threads": "data.columns",
    "data.hanging": "data.feeds.hanging",
    "data.host_feed": "data.feeds.host",
    "data.keyed": "data.rng",
    "data.making": "data.tools.convert",
    "data.published": "data.tools.published",
    "data.quality": "data.window_order",
    "data.reader": "data.feeds.host",
    "data.residency": "data.feeds.residency",
    "data.restricted": "data.safe_pickle",
    "data.scaling": "data.transforms",
    "data.shared_memory": "data.feeds.shared_memory",
    "data.shuffle": "data.tools.shuffle",
    "data.tools.converters": "data.tools.convert",
    "data.tools.describe_files": "data.tools.describe",
    "data.workers": "data.feeds.workers",
    "early_stop": "system.early_stop",
    "engine.accelerator": "system.devices",
    "engine.agreement": "engine.stopping",
    "engine.batch_hooks": "engine.lightning.batch_hooks",
    "engine.cadence": "engine.config",
    "engine.checkpoint": "engine.state.checkpoint",
    "engine.device": "system.devices",
    "engine.ema": "engine.optim.ema",
    "engine.evaluate": "engine.evaluation",
    "engine.evaluations": "engine.evaluation",
    "engine.extra_state": "engine.state.module_state",
    "engine.fingerprint": "runs.fingerprint",
    "engine.fitting": "engine.transforms",
    "engine.fused": "engine.optim.fused_adam",
    "engine.git": "runs.git",
    "engine.graph": "engine.step.cuda_graph",
    "engine.handed": "runs.given_data",
    "engine.hooks": "engine.lightning.hooks",
    "engine.journal": "engine.metrics.windows",
    "engine.late_compiler": "engine.optim.late_compiler",
    "engine.layers": "engine.diagnose.layers",
    "engine.loaders": "engine.lightning.loaders",
    "engine.lock": "runs.lock",
    "engine.losses": "engine.metrics.losses",
    "engine.manual": "engine.lightning.manual_optimization",
    "engine.memory": "engine.diagnose.memory",
    "engine.metrics.monitored": "engine.metrics.monitors",
    "engine.metrics.together": "engine.evaluation",
    "engine.monitored": "engine.metrics.monitors",
    "engine.monitors": "engine.metrics.monitors",
    "engine.nan_guard": "engine.step.nan_guard",
    "engine.operations": "engine.diagnose.trace",
    "engine.optimizers": "engine.optim.optimizers",
    "engine.overlap": "engine.step.ddp",
    "engine.overrides": "engine.lightning.overrides",
    "engine.pairs": "engine.metrics.weighted_sum",
    "engine.place": "runs.lock",
    "engine.planner": "engine.boundaries",
    "engine.profile": "engine.diagnose.profile",
    "engine.program_choice": "engine.step.choice",
    "engine.programs": "engine.step.programs",
    "engine.progress": "engine.state.progress",
    "engine.record_check": "runs.record",
    "engine.recorder": "engine.metrics.accumulators",
    "engine.reproducer": "engine.diagnose.reproducer",
    "engine.roles": "engine.splits",
    "engine.run_directory": "runs.directory",
    "engine.run_record": "runs.record",
    "engine.saver": "engine.state.writer",
    "engine.schedules": "engine.optim.schedules",
    "engine.seal": "recipe.seal",
    "engine.sharing": "engine.state.replicas",
    "engine.show": "engine.figures",
    "engine.spread": "engine.optim.spread",
    "engine.stage": "engine.step.context",
    "engine.staging": "engine.state.host_snapshot",
    "engine.state.output": "engine.state.writer",
    "engine.state.sharing": "engine.state.replicas",
    "engine.stop": "engine.stopping",
    "engine.survey": "engine.dataset_metrics",
    "engine.tensor_files": "engine.state.tensor_files",
    "engine.together": "engine.evaluation",
    "engine.untrained": "engine.step.untrained",
    "engine.verify": "engine.state.replicas",
    "exporting": "runs.export",
    "launch.job_script": "launch.job",
    "launch.jobs": "launch.status",
    "launch.profiles": "launch.config",
    "launch.slurm": "launch.schedulers.slurm",
    "launch.stretches": "runs.attempts",
    "layers": "runs.layers",
    "observe.courier": "observe.ranks.sender",
    "observe.doctor.cluster": "observe.doctor.checks",
    "observe.doctor.mpi": "observe.doctor.checks",
    "observe.event_file": "observe.tensorboard.observer",
    "observe.exhibits": "observe.figures",
    "observe.fence": "observe.observers",
    "observe.files": "system.files",
    "observe.layer_table": "observe.tables",
    "observe.layers": "observe.tables",
    "observe.loggers.ledger": "observe.loggers.logger",
    "observe.machine": "system.machine",
    "observe.profile": "observe.tables",
    "observe.profile_table": "observe.tables",
    "observe.rank_log": "observe.ranks.rank_log",
    "observe.streams": "observe.ranks.streams",
    "observe.summaries": "observe.tensorboard.summaries",
    "observe.tensorboard.event_file": "observe.tensorboard.observer",
    "observe.tensorboard_server": "observe.tensorboard.server",
    "observe.waiting": "observe.progress",
    "opening": "runs.open",
    "parallel.board": "parallel.health.signed_store",
    "parallel.buffer": "parallel.reduction",
    "parallel.checkup": "parallel.health.checkup",
    "parallel.environment": "parallel.environments.find",
    "parallel.environments.node_list": "parallel.environments.schedulers",
    "parallel.environments.plain": "parallel.environments.find",
    "parallel.facts": "parallel.rank_info",
    "parallel.health.sockets": "parallel.health.client",
    "parallel.hub": "parallel.health.server",
    "parallel.network": "parallel.health.probe",
    "parallel.plain": "parallel.serialize",
    "parallel.preflight": "parallel.health.preflight",
    "parallel.process": "system.process",
    "parallel.ranks": "parallel.collectives",
    "parallel.rendezvous": "parallel.health.rendezvous",
    "parallel.sockets": "parallel.health.client",
    "parallel.watch": "parallel.health.client",
    "printing": "system.printing",
    "rank_logs": "observe.ranks.opening",
    "rank_map": "observe.ranks.rank_map",
    "recipe.finding": "recipe.outline",
    "recipe.importing.deepmd": "science.potentials.deepmd.translation",
    "recipe.importing.deepmd_said": "science.potentials.deepmd.said",
    "recipe.importing.deepmd_words": "science.potentials.deepmd.tables",
    "recipe.importing.files": "science.electronic.mala.files",
    "recipe.importing.imported": "science.importing",
    "recipe.importing.mala": "science.electronic.mala.translation",
    "recipe.importing.mala_snapshots": "science.electronic.mala.snapshots",
    "recipe.importing.mala_words": "science.electronic.mala.tables",
    "recipe.json_reader": "recipe.formats.json_reader",
    "recipe.optimizers": "recipe.check",
    "recipe.tree": "recipe.formats.tree",
    "recipe.vision": "recipe.components",
    "recipe.yaml_reader": "recipe.formats.yaml_reader",
    "recipe.yaml_writer": "recipe.formats.yaml_writer",
    "replay": "runs.replay",
    "rescue": "runs.rescue",
    "run": "runs.run",
    "runs.opened": "runs.open",
    "runs.place": "runs.lock",
    "runs.record_check": "runs.record",
    "runs.system_table": "runs.summary",
    "science.catalog": "science.images.downloads",
    "science.electronic.showing": "science.electronic.results",
    "science.electronic.snapshot_files": "science.electronic.snapshots",
    "science.images.metrics": "science.images.classifier",
    "science.potentials.deepmd_checkpoint": "science.potentials.deepmd.checkpoint",
    "session": "runs.session",
    "signals": "system.signals",
    "study.figures": "study.report.figures",
    "study.markup": "study.report.page",
    "study.plot": "study.report.charts",
    "study.sections": "study.report.page",
    "study.settings": "study.report.page",
    "summary": "runs.summary",
    "system_table": "runs.summary",
    "weights": "runs.init_from",
}
"""Inside the package: where a module was, and where it is."""


class _Mover(Loader):
    def __init__(self, target: str) -> None:
        self._target = target
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # which Python has replaced by that of the old name


class MovedModules(MetaPathFinder):
    """Finds modules by their old names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where a module is now; None for all others."""
        package, _, name = fullname.partition(".")
        if package != "isoscale" or name not in MOVED:
            return None
        _warn(fullname, f"isoscale.{MOVED[name]}")
        return ModuleSpec(fullname, _Mover(f"isoscale.{MOVED[name]}"))


def moved_into(old: str, new: str) -> Callable[[str], Any]:
    """A `__getattr__` for a package that was a module once: the names of that module."""

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            found = getattr(importlib.import_module(new), name)
        except AttributeError:
            raise AttributeError(f"module {old!r} has no attribute {name!r}") from None
        _warn(f"{old}.{name}", f"{new}.{name}")
        return found

    return find


def renamed(name: str, names: Mapping[str, str], prefix: str = "") -> str:
    """The present one of a name that may be an old one, with a warning where it is."""
    if name in names:
        _warn(f"{prefix}{name}", f"{prefix}{names[name]}")
    return names.get(name, name)


def renamed_argument(old: str, new: str) -> Callable[[Callable[Given, Found]], Callable[Given, Found]]:
    """A decorator: the function takes the old keyword of an argument too, with a warning."""

    def decorate(function: Callable[Given, Found]) -> Callable[Given, Found]:
        @functools.wraps(function)
        def called(*args: Given.args, **kwargs: Given.kwargs) -> Found:
            if old in kwargs:
                _warn(f"{function.__name__}({old}=…)", f"{function.__name__}({new}=…)")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return called

    return decorate


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=3)


def install() -> None:
    """Let old names be found from now on."""
    if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(MovedModules())
