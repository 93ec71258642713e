"""The recipe's parallel section says nothing that would be ignored."""

import pytest

from isoscale.parallel.config import Parallel


def test_shards_without_a_tree_are_refused():
    with pytest.raises(ValueError, match="only with reduce: tree"):
        Parallel(shards=4)
    assert Parallel(reduce="tree", shards=4).shards == 4
