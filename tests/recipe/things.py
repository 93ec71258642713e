"""Components of the kinds that users write, for the tests of recipes."""

from typing import Literal


class Net:
    def __init__(
        self,
        widths: list[int],
        activation: Literal["relu", "tanh"] = "relu",
        dropout: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.99),
        head: "Net | None" = None,
    ):
        self.widths = widths
        self.activation = activation
        self.dropout = dropout
        self.betas = betas
        self.head = head


class Science:
    def __init__(self, model: object, loss: str = "mse", parts: object = None):
        self.model = model
        self.loss = loss
        self.parts = parts


class Samples:
    def __init__(self, path: str, num_rows: int = 10):
        self.path = path
        self.num_rows = num_rows


class Scale:
    def __init__(self, by: float = 1.0):
        self.by = by


class Anything:
    def __init__(self, **options: object):
        self.options = options


class Unresolvable:
    def __init__(self, value: "NotDefinedAnywhere"):  # noqa: F821
        self.value = value


class Outer:
    class Inner:
        def __init__(self) -> None:
            self.is_inner = True


number = 3
