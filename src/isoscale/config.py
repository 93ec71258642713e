"""What every section of a recipe has in common: unknown keys are refused, field docs are the reference."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A section of a recipe. The docstring under each field is its documentation."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True, populate_by_name=True
    )


class OpenConfig(Config):
    """A section whose further keys are the arguments of the component that it names."""

    model_config = ConfigDict(extra="allow")

    @property
    def arguments(self) -> dict[str, object]:
        """The keys that are not fields of this section, as written."""
        return dict(self.__pydantic_extra__ or {})
