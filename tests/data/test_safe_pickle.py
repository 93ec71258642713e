"""Pickles of arrays are read; nothing that a pickle asks for is ever called."""

import os
import pickle
import subprocess
import warnings
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from isoscale.data.safe_pickle import loads

VALUES = {
    "array": np.arange(6.0).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "strided": np.arange(8.0)[::2],
    "other order": np.arange(3, dtype=">i2"),
    "flags": np.array([True, False]),
    "empty": np.empty((0, 3)),
    "words": np.array(["ab", "c"]),
    "scalar": np.float64(3.5),
    "tensor": torch.arange(6).view(2, 3),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "half": torch.ones(2, dtype=torch.bfloat16),
    "plain": [1, (2, "x"), None, 2.5, True, {"deep": {1, 2}}, frozenset([3])],
    "bytes": b"raw\xff",
    "ordered": OrderedDict(a=1),
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("name", VALUES)
def test_arrays_and_plain_values_come_back(name: str, protocol: int):
    value = VALUES[name]
    read = loads(pickle.dumps([value, value], protocol))[0]
    if isinstance(value, np.ndarray):
        np.testing.assert_array_equal(read, value)
        assert read.dtype == value.dtype and read.flags.writeable
    elif isinstance(value, torch.Tensor):
        assert torch.equal(read, value) and read.dtype == value.dtype
    else:
        assert read == value


def test_a_view_does_not_bring_all_of_its_memory_along():
    read = loads(pickle.dumps(torch.arange(10_000)[3:5]))
    assert read.tolist() == [3, 4] and read.untyped_storage().nbytes() == 16


class Calls:
    def __init__(self, function, *arguments) -> None:
        self.called = (function, arguments)

    def __reduce__(self):
        return self.called


@pytest.mark.parametrize("function", [os.system, eval, exec, subprocess.run, np.load, torch.load, Path, getattr, type])
def test_whatever_else_is_asked_for_is_refused_by_name(function):
    with pytest.raises(pickle.UnpicklingError, match=r"it asks for .*, which no array needs"):
        loads(pickle.dumps({"x": [Calls(function, "1")]}))


def test_nothing_is_run(tmp_path: Path):
    harmful = pickle.dumps(Calls(os.mkdir, str(tmp_path / "made")))
    with pytest.raises(pickle.UnpicklingError):
        loads(harmful)
    assert not (tmp_path / "made").exists()
    pickle.loads(harmful)
    assert (tmp_path / "made").exists(), "it would have been"


def test_pickles_inside_of_a_tensor_are_not_run_either(tmp_path: Path):
    harmful = pickle.dumps(Calls(os.mkdir, str(tmp_path / "made")))
    with pytest.raises(Exception, match=r"(?i)weights.only|unsupported|storage"):
        loads(pickle.dumps(Calls(torch._utils._rebuild_tensor_v2, Stored(harmful), 0, (1,), (1,), False, {})))
    assert not (tmp_path / "made").exists()


class Stored:
    def __init__(self, content: bytes) -> None:
        self.content = content

    def __reduce__(self):
        return torch.storage._load_from_bytes, (self.content,)


def test_an_array_of_objects_is_refused():
    with pytest.raises(pickle.UnpicklingError, match="neither of numbers nor of text"):
        loads(pickle.dumps(np.array([{}, []], object)))


def test_a_tensor_cannot_reach_beyond_its_memory():
    with warnings.catch_warnings(action="ignore"):
        storage = torch.arange(4).storage()
    reaching = Calls(torch._utils._rebuild_tensor_v2, storage, 0, (1 << 30,), (1,), False, {})
    with pytest.raises(RuntimeError):
        loads(pickle.dumps(reaching))


def test_what_a_pickle_sets_on_the_helpers_stays_inside():
    """The state that a pickle may give to any object must not change what the next pickle is read with."""
    state = b"ctorch._utils\n_rebuild_tensor_v2\n(N}S'finished'\nNstb."
    with pytest.raises(Exception):  # noqa: B017
        loads(state)
    assert torch.equal(loads(pickle.dumps(torch.arange(3))), torch.arange(3))
