"""`init` in the run file: initial weights and frozen variables."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, ValidationError

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.change_class import identity


def _patterns(value: object) -> object:
    """A single pattern needs no list."""
    return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str) else value


_Patterns = Annotated[tuple[str, ...], BeforeValidator(_patterns)]


class WeightsSource(Contract):
    """Where initial weights come from, and which variables they are for."""

    source: str = Field(
        min_length=1,
        description="a .weights.h5 or .keras file, a SavedModel, a TensorFlow checkpoint, the home of a Baton run, or "
        "a function, weights.py:load",
    )
    step: int | Literal["best"] | None = Field(
        default=None, description="of a Baton run: which checkpoint, a step or best; left out: the newest"
    )
    include: _Patterns = Field(
        default=("*",), min_length=1, description="patterns of the model's variable paths that are to be loaded"
    )
    exclude: _Patterns = Field(
        default=(), description="patterns of variable paths, in the model or the source, that are not loaded"
    )
    rename: dict[str, str] = Field(
        default_factory=dict, description="the model's names to the source's; a name is a path or the beginning of one"
    )
    strict: bool = Field(
        default=True,
        description="false tolerates variables that are missing, unused or of another shape, and reports them",
    )


def _sources(value: object) -> object:
    """A single source needs no list, and may be just its address."""
    return tuple(map(_source, value if isinstance(value, list | tuple) else [value]))


def _source(value: object) -> object:
    """Check one source. The key of an error within a list is lost, so the message names it."""
    if isinstance(value, WeightsSource):
        return value
    if isinstance(value, str):
        value = {"source": value}
    keys = ", ".join(WeightsSource.model_fields)
    if not isinstance(value, dict):
        raise ValueError(f"a source is an address, or a mapping of {keys}")  # noqa: TRY004 - pydantic's kind of error
    try:
        return WeightsSource.model_validate(value)
    except ValidationError as faults:
        fault = faults.errors()[0]
        key = str(fault["loc"][0])
        if fault["type"] == "extra_forbidden":
            raise ValueError(f"{key} is no key of a source; the keys are {keys}") from None
        raise ValueError(f"{key} should be {WeightsSource.model_fields[key].description}") from None


class InitSpec(Contract):
    """What a run starts from, besides its seed."""

    weights: Annotated[
        tuple[WeightsSource, ...], BeforeValidator(_sources), identity("other initial weights", "init.weights")
    ] = Field(
        default=(),
        description="pretrained weights: an address, or {source, step, include, exclude, rename, strict}; or a list",
    )
    freeze: Annotated[
        _Patterns, identity("other variables are trained", "init.freeze", "model.config", "model.signature")
    ] = Field(
        default=(), description="patterns of paths of layers or variables that are not trained, such as encoder/*"
    )
