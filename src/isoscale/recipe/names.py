"""The short names of components, and the class paths that they stand for."""

SHORT_NAMES = {
    "supervised": "isoscale.engine.task.Supervised",
    "classifier": "isoscale.science.images.Classifier",
    "mlp": "isoscale.science.models.MLP",
    "digits": "isoscale.science.images.Digits",
    "arrays": "isoscale.data.sources.Arrays",
    "divide": "isoscale.data.transforms.Divide",
    "flatten": "isoscale.data.transforms.Flatten",
    "normalize": "isoscale.data.transforms.Normalize",
}


def class_path(name: str) -> str:
    """The full path of a class, in one spelling: `mlp` and `isoscale.science.models:MLP` are the same."""
    return SHORT_NAMES.get(name.lower(), name).replace(":", ".")
