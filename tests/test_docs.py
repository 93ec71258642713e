"""The documentation is true: its blocks run, and the reference is what the schema says."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```(\w+) ?(?:(file|fails)=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_reference_is_up_to_date():
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (DOCS / "reference.md").read_text(encoding="utf-8") == module.reference(), "run docs/make_reference.py"


def test_links_between_pages_lead_somewhere():
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.slow
def test_the_tutorial_runs_from_top_to_bottom(tmp_path: Path):
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin/isoscale"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m isoscale "$@"\n')
    script.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    for language, word, argument, text in BLOCK.findall((DOCS / "tutorial.md").read_text(encoding="utf-8")):
        if word == "file":
            (tmp_path / argument).write_text(text)
            continue
        command = ["bash", "-ec", text] if language == "bash" else [sys.executable, "-c", text]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        expected = int(argument) if word == "fails" else 0
        assert done.returncode == expected, f"{text}\n{done.stdout}\n{done.stderr}"
