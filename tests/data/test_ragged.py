"""Samples of many sizes in one batch: every row is where it belongs, and padding is told apart."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isoscale.data.ragged import Level, RaggedSource, is_ragged, packer, sizes_of
from isoscale.data.sources import Subset
from isoscale.errors import UserError
from tests.data.ragged_made import graphs

SOURCE = graphs(40, 3)


def rows_of(index: int) -> dict[str, np.ndarray]:
    """What a sample is made of, from the stored columns."""
    sizes = SOURCE.sizes
    start, stop = (int(sizes[:end, 0].sum()) for end in (index, index + 1))
    first, last = (int(sizes[:end, 1].sum()) for end in (index, index + 1))
    edges = {name: SOURCE.column(name)[first:last].numpy() for name in ("source", "target", "by_source")}
    return {"x": SOURCE.column("x")[start:stop].numpy(), **edges}


@given(st.lists(st.integers(0, 39), min_size=1, max_size=6), st.integers(1, 9), st.integers(0, 40))
def test_a_batch_holds_every_sample_behind_the_one_before(chosen: list[int], spare: int, more: int) -> None:
    need = SOURCE.sizes[chosen].sum(0)
    room = int(need[0]) + spare, int(need[1]) + more
    batch = SOURCE.pack(torch.tensor(chosen), room)
    atoms = edges = 0
    for number, index in enumerate(chosen):
        own = rows_of(index)
        mine = slice(atoms, atoms + len(own["x"]))
        np.testing.assert_array_equal(batch["x"][mine], own["x"])
        assert (batch["batch"][mine] == number).all()
        held = slice(edges, edges + len(own["source"]))
        np.testing.assert_array_equal(batch["source"][held] - atoms, own["source"])
        np.testing.assert_array_equal(batch["target"][held] - atoms, own["target"])
        np.testing.assert_array_equal(batch["by_source"][held] - edges, own["by_source"])
        atoms, edges = mine.stop, held.stop
    assert (batch["batch"][atoms:] == len(chosen)).all()
    assert (batch["x"][atoms:] == 0).all()
    assert (batch["source"][edges:] == room[0] - 1).all() and (batch["target"][edges:] == room[0] - 1).all()
    assert sorted(batch["by_source"].tolist()) == list(range(room[1])), "it permutes the edges of the whole batch"
    assert batch["source"][batch["by_source"]].diff().ge(0).all(), "and sorts them by where they begin"
    assert batch["y"].tolist() == SOURCE.rows["y"][chosen].tolist()


def test_samples_are_fetched_without_padding_and_parts_of_a_source_pack_alike() -> None:
    some = torch.tensor([7, 3, 3])
    batch = SOURCE.fetch(some)
    assert (len(batch["x"]), len(batch["source"])) == tuple(SOURCE.sizes[[7, 3, 3]].sum(0))
    part = Subset(Subset(SOURCE, torch.tensor([9, 7, 3])), torch.tensor([1, 2]))
    assert is_ragged(part) and (sizes_of(part) == SOURCE.sizes[[7, 3]]).all()
    packed = packer(part, torch.device("cpu"))(torch.tensor([0, 1, 1]), (64, 128))
    for name, values in SOURCE.pack(some, (64, 128)).items():
        assert torch.equal(packed[name], values), name


def test_samples_without_any_rows_of_a_level_have_padding_alone() -> None:
    empty = {"source": np.zeros(0, np.int32)}
    source = RaggedSource(
        {}, {"atoms": Level([1, 2], {"x": np.ones(3)}), "edges": Level([0, 0], empty)}, {"source": "atoms"}
    )
    assert source.pack(torch.tensor([1]), (4, 2))["source"].tolist() == [3, 3]


@pytest.mark.parametrize(
    ("counts", "rows", "words"),
    [([1, 2], np.ones(4), "x has 4 rows, but the samples have 3 atoms"), ([1, 2, 1], np.ones(4), r"rows are \[2, 3\]")],
)
def test_arrays_that_do_not_fit_together_are_refused(counts: Sequence[int], rows: np.ndarray, words: str) -> None:
    with pytest.raises(UserError, match=words):
        RaggedSource({"y": np.zeros(2)}, {"atoms": Level(counts, {"x": rows})})
