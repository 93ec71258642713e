"""Plain data goes through JSON, with its tensors aside, and comes back as it was."""

import json
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from isoscale.parallel.serialize import NotPlain, put_together, take_apart

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
KEYS = st.text(max_size=4) | st.integers() | st.tuples(st.integers(), st.text(max_size=2))
DATA = st.recursive(
    SCALARS | st.frozensets(st.integers(), max_size=3) | st.sets(st.text(max_size=2), max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.lists(inner, max_size=3).map(lambda entries: deque(entries, maxlen=5))
    ),
    max_leaves=12,
)


def through_json(value: Any) -> tuple[Any, dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    return json.loads(json.dumps(take_apart(value, "x", tensors))), tensors


@given(DATA)
def test_plain_data_comes_back_as_it_was(value: Any) -> None:
    again = put_together(*through_json(value))
    assert again == value and through_json(again) == through_json(value)


def test_tensors_and_arrays_come_back_as_they_were() -> None:
    value = {
        "a": (torch.ones(2), [torch.zeros(3)]), 3: np.arange(4, dtype=">i2"), "d": deque([np.float32(1.5)], maxlen=2),
        "read": np.broadcast_to(np.float64(2.0), (2, 2)),
    }  # fmt: skip
    again = put_together(*through_json(value))
    assert again["a"][0] is value["a"][0] and again["a"][1][0] is value["a"][1][0]
    assert again[3].tolist() == [0, 1, 2, 3] and again["d"] == value["d"] and again["d"].maxlen == 2
    assert type(again["d"][0]) is np.float32 and np.array_equal(again["read"], value["read"])


def test_no_two_tensors_get_the_same_name() -> None:
    value = {
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1), "0": torch.full((1,), 2.0)},
        "1": torch.ones(2),
        7: [torch.zeros(2)],
    }
    again = put_together(*through_json(value))
    assert again["a.b"] is value["a.b"] and again["a"]["b"] is value["a"]["b"] and again["a"]["0"] is value["a"]["0"]
    assert again["1"] is value["1"] and again[7][0] is value[7][0]


def test_what_is_there_already_is_filled_and_stays_the_same_object() -> None:
    live = {"list": [1, 2], "gone": 1, "dict": {"a": 1}}
    inner = live["list"], live["dict"]
    again = put_together(*through_json({"list": [3], "dict": {"b": 2}}), live)
    assert again is live and live == {"list": [3], "dict": {"b": 2}} and (live["list"], live["dict"]) == inner
    assert live["list"] is inner[0] and live["dict"] is inner[1]


@pytest.mark.parametrize(
    "value", [object(), [object()], torch.eye(2).to_sparse(), {1j: 2}, range(3), list(range(10**5 + 1))]
)
def test_what_is_not_plain_is_not_taken(value: Any) -> None:
    with pytest.raises(NotPlain):
        take_apart(value, "x", {})


def test_structures_of_earlier_versions_are_read() -> None:
    old = {"dict": {"a": {"tuple": [{"tensor": "t"}, {"value": 3}]}, "b": {"list": [{"value": None}]}}}
    tensors = {"t": torch.ones(2)}
    assert put_together(old, tensors) == {"a": (tensors["t"], 3), "b": [None]}
