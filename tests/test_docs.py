"""The documentation is true: its blocks run in order, links lead somewhere, and the reference is what the code says."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from tests import warm
from tests.study.browser import CHROMIUM, OPTIONS, needs_chromium

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])
NOTEBOOKS = sorted(DOCS.rglob("*.ipynb"))
DATA_SETS = ("fashion-mnist", "mnist")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


run_blocks = load("run_blocks")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def executed_text(page: Path) -> str:
    return "".join(block.text for block in run_blocks.blocks(page) if block.is_executed)


EXECUTED = [page for page in [*PAGES, *NOTEBOOKS] if executed_text(page)]


@pytest.mark.parametrize("page", ["reference.md", "components.md", "commands.md", "python.md"])
def test_the_reference_is_up_to_date(page: str):
    written = load("make_reference").PAGES[page]()
    assert (DOCS / page).read_text(encoding="utf-8") == written, "run docs/make_reference.py"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_between_pages_lead_somewhere(page: Path):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_executed_or_says_why_not(page: Path):
    text = page.read_text(encoding="utf-8")
    found = run_blocks.blocks(page)
    num_fences = 2 * (len(found) + sum(block.message is not None for block in found))
    assert len(re.findall(r"^\s*(?:```|~~~)", text, re.MULTILINE)) == num_fences, "a fence that nothing reads"
    assert text.count("<!-- not executed") == sum(block.reason is not None for block in found), "a comment astray"
    assert {block.language for block in found} <= {"bash", "python", "yaml", "text"}


def test_few_blocks_are_not_executed():
    found = [block for page in PAGES for block in run_blocks.blocks(page) if block.language != "text"]
    assert sum(block.reason is not None for block in found) <= len(found) // 5


@pytest.fixture(scope="module")
def commands() -> Iterator[str]:
    """A folder that holds the command `isoscale`, ready to be put before others on the PATH."""
    with tempfile.TemporaryDirectory() as folder, warm.command_in(Path(folder)):
        yield folder


@pytest.mark.full
@pytest.mark.parametrize("page", EXECUTED, ids=name_of)
def test_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, commands: str, real_data: Callable[[str], Path]
) -> None:
    path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "MPLBACKEND": "Agg"}
    text = executed_text(page)
    for name in (name for name in DATA_SETS if re.search(rf"(?<![\w-]){name}\b", text)):
        folder = real_data(name).parent
        environment["ISOSCALE_DATA"] = str(folder)
        if not (tmp_path / "downloads").exists():
            (tmp_path / "downloads").symlink_to(folder)
    command = [sys.executable, str(DOCS / "run_blocks.py"), str(page)]
    with (tmp_path / "output.txt").open("w+") as output:
        running = warm.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=output, process_group=0)
        try:
            code = running.wait(timeout=300)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)  # whatever a block has left running
        output.seek(0)
        assert code == 0, output.read()[-8000:]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=name_of)
def test_a_notebook_is_stored_without_outputs(notebook: Path):
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.fixture(scope="module")
def site() -> Iterator[Path]:
    """The pages as `make docs` builds them, without a warning."""
    pytest.importorskip("mkdocs", reason="needs mkdocs: pip install 'isoscale[docs]'")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        yield Path(folder)


@pytest.mark.full
def test_the_site_asks_no_other_server(site: Path):
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|link|iframe)\b[^>]*(?:src|href)=\"?(https?:[^\s\">]+)", page.read_text())
        assert not loaded, f"{page.name} loads {loaded}"


@pytest.mark.full
@needs_chromium
@pytest.mark.parametrize("page", ["index.html", "how-to/train/checkpoints.html"])
def test_a_page_that_is_opened_from_a_folder_can_search(site: Path, page: str, tmp_path: Path):
    address = f"{(site / page).as_uri()}?q=hyperparameter"
    command = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.findall(r'<a href="([^"]+)" class="md-search-result__link"', done.stdout)
    assert any("how-to/train/sweeps.html" in link for link in found), done.stderr[-2000:]
