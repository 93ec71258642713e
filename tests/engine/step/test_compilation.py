"""What torch.compile cannot do is said in words."""

import pytest

from isoscale.engine.step.choice import compilation_explained
from isoscale.errors import UserError


def test_derivatives_of_derivatives_are_refused_with_the_way_out() -> None:
    with (
        pytest.raises(UserError, match=r"cannot differentiate those once more; use train\.program=auto"),
        compilation_explained(),
    ):
        raise RuntimeError("torch.compile with aot_autograd does not currently support double backward")


def test_other_errors_are_left_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="something else"), compilation_explained():
        raise RuntimeError("something else")
