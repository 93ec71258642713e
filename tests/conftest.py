"""What every test may rely on."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

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
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing that tests compute stays in the user's cache, and nothing in there is taken for theirs."""
    os.environ["ISOSCALE_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread_in_each_subprocess() -> None:
    """Two test workers share the cores; torch reads its own thread count first, so that this process keeps it."""
    import torch

    torch.get_num_threads()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
