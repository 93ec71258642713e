"""What ranks send each other arrives as it was, and what could hold code is not sent."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given

from isoscale.parallel.messages import pack, unpack
from isoscale.parallel.secret import Key
from tests.parallel.test_serialize import DATA

KEY = Key(b"the secret of a test")


def through(value: Any) -> Any:
    return unpack(pack(value, "a word", KEY), "a word", KEY)


@given(DATA)
def test_plain_data_arrives_as_it_was(value: Any):
    assert through(value) == value


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.int8, torch.complex64,
                                   torch.float8_e4m3fn])  # fmt: skip
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)])
def test_tensors_arrive_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]):
    tensor = torch.randint(0, 2, shape).to(dtype)
    found = through([tensor, {"same": tensor.mT if tensor.ndim > 1 else tensor}])
    assert found[0].dtype == dtype and found[0].shape == shape
    assert torch.equal(found[0].to(torch.complex128), tensor.to(torch.complex128))
    assert found[1]["same"].shape == (tensor.mT.shape if tensor.ndim > 1 else shape)


def test_arrays_paths_shapes_and_types_arrive():
    array, path = np.arange(6.0).reshape(2, 3)[:, ::2], Path("/a", "b\udcff")
    found = through({"array": array, "at": path, "shape": torch.Size([2, 3]), "type": torch.float16, "nan": np.nan})
    assert np.array_equal(found["array"], array) and found["at"] == path
    assert found["shape"] == (2, 3) and found["type"] is torch.float16 and found["nan"] != found["nan"]


class WeightedSum(NamedTuple):
    a: int
    b: int


@pytest.mark.parametrize("value", [WeightedSum(1, 2), object(), print, torch.eye(2).to_sparse(), b"bytes"])
def test_what_is_not_plain_is_refused_by_name(value: Any):
    with pytest.raises(TypeError, match="ranks cannot tell each other a word: it is a"):
        pack([value], "a word", KEY)
