"""`data` in the run file: where the examples come from and how they are laid out."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.change_class import identity, operational
from tasks.foundation.contracts.code_reference import check_code_reference

_EXAMPLES = "data.content_digest"
_CHECK_ONLY = "a check of the examples; it changes none"


def _check_source(source: str) -> str:
    return check_code_reference(source) if ":" in source else source


def _check_batched(batched: bool | None) -> bool | None:
    if batched:
        raise ValueError(
            "batches are not read yet; yield their examples one by one, as yield from zip(x, y), and drop the key"
        )
    return batched


class DataSpec(Contract):
    """Where the examples come from and how they are laid out."""

    source: Annotated[str, AfterValidator(_check_source), identity("other examples", _EXAMPLES)] = Field(
        description="a built-in source (csv, digits, images, npz, text, tfrecord) or a generator function, data.py:load"
    )
    options: Annotated[dict[str, Any], identity("other examples, where the option changes them", _EXAMPLES)] = Field(
        default_factory=dict, description="settings of the source, such as path; keyword arguments of data.py:load"
    )
    version: Annotated[str | int, identity("the source is read again, and may give other examples", _EXAMPLES)] = Field(
        default=0, description="change it when the data that data.py:load reads changed but its code did not"
    )
    validation_fraction: Annotated[float, identity("other examples are held out", _EXAMPLES)] = Field(
        default=0.1, ge=0, lt=1, description="share of the examples that is held out, at least 0 and below 1"
    )
    classes: Annotated[int | None, operational(_CHECK_ONLY)] = Field(
        default=None, ge=1, description="number of classes; labels y must lie in [0, classes)"
    )
    allow_nan: Annotated[bool, operational(_CHECK_ONLY)] = Field(
        default=False, description="true lets NaN and infinity into the dataset"
    )
    batched: Annotated[
        bool | None,
        AfterValidator(_check_batched),
        operational("says whether data.py:load yields batches; it changes no example"),
    ] = Field(
        default=None,
        description="false: data.py:load yields single examples; left out: refused if they look like batches",
    )
    shard_examples: Annotated[int | None, identity("other shards, and so another order", _EXAMPLES)] = Field(
        default=None, ge=1, description="examples in a shard; left out: about 32 MiB of them"
    )
    window_shards: Annotated[int, identity("another order", "data.window_shards")] = Field(
        default=8, ge=1, description="shards that are read and shuffled together, in memory; at least 1"
    )
