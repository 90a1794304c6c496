"""`data.pad` and `data.pack` in the run file: how sequences of different lengths become arrays of one shape."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from tasks.foundation.contracts.base import Contract


class PadRule(Contract):
    """How one feature is padded along its first dimension."""

    length: int = Field(ge=1, description="its first dimension after padding")
    value: float | int | str = Field(default=0, description="fills the rest; text is filled with empty strings")
    longer: Literal["refuse", "truncate"] = Field(
        default="refuse", description="what happens to longer sequences; truncate keeps their beginning"
    )


def _from_length(value: object) -> object:
    """Return `{x: 128}` as `{x: {length: 128}}`."""
    if not isinstance(value, Mapping):
        return value
    return {name: {"length": rule} if isinstance(rule, int) else rule for name, rule in value.items()}


PadField = Annotated[Annotated[dict[str, PadRule], Field(min_length=1)] | None, BeforeValidator(_from_length)]


class PackSpec(Contract):
    """How sequences are packed: several of them in one row of a fixed length."""

    length: int = Field(ge=2, description="tokens in a row")
    longer: Literal["refuse", "split"] = Field(
        default="refuse", description="what happens to sequences longer than a row; split cuts them into several"
    )


def _pack_from_length(value: object) -> object:
    return {"length": value} if isinstance(value, int) and not isinstance(value, bool) else value


PackField = Annotated[PackSpec | None, BeforeValidator(_pack_from_length)]
