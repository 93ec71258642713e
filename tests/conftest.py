"""What every test may rely on."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# Test workers share the cores, where threads that wait for each other take ten times as long. Torch reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# `nohup make test` and `make test &` ignore these, which is inherited, and isoscale heeds it: not in its tests.
for _number, _plain in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _plain)

settings.register_profile("isoscale", deadline=None)
settings.load_profile("isoscale")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of larger data sets; without ISOSCALE_SHARED the test skips, with a wrong one it fails."""
    folder = os.environ.get("ISOSCALE_SHARED")
    if not folder:
        pytest.skip("needs data: set ISOSCALE_SHARED to the folder that holds it")
    if not Path(folder).is_dir():
        pytest.fail(f"ISOSCALE_SHARED is {folder!r}, which is not a folder")
    return Path(folder)


@pytest.fixture(scope="session")
def real_data() -> Callable[[str], Path]:
    """The folder of a real data set, as tests/stage_data.py put it there; without it the test skips."""

    def find(name: str) -> Path:
        folder = os.environ.get("ISOSCALE_TEST_DATA")
        if not folder:
            pytest.skip("needs real data: run tests/stage_data.py DIR and set ISOSCALE_TEST_DATA to DIR")
        if not (Path(folder) / name).is_dir():
            pytest.skip(f"needs {name}, which tests/stage_data.py could not stage in {folder}")
        return Path(folder) / name

    return find


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing that tests make stays in the user's cache or settings, and nothing in there is taken for theirs."""
    os.environ["ISOSCALE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("settings"))


HOW_TO_GET_DATA = {
    "ISOSCALE_SHARED": "set ISOSCALE_SHARED to a folder laid out as in CONTRIBUTING.md, under Data for tests",
    "stage_data.py": "run .venv/bin/python tests/stage_data.py DIR, and set ISOSCALE_TEST_DATA=DIR",
}
"""What to do about a test that needs data which is not here, by a word in its reason to skip."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say last what did not run for want of data, and how to get it."""
    reasons = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])]
    for word, advice in HOW_TO_GET_DATA.items():
        count = sum(word in reason for reason in reasons)
        if count:
            terminalreporter.write_line(f"{count} tests did not run for want of data: {advice}", yellow=True)
