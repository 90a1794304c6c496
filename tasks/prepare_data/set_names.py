"""Errors about an own set, or about one source of a mixture, name its keys, not those of `data` itself."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from tasks.foundation.contracts.evaluation_sets import SetName
from tasks.foundation.errors import RunFileError, SourceError

_KEYS = re.compile(r"\bdata\.(source|options|version|batched|examples)\b")


@contextmanager
def errors_of_set(name: SetName) -> Iterator[None]:
    """Use around work on the `data` of an own set: `data.options.path` in an error becomes `data.test.options.path`.

    Args:
        name: the set.

    Raises:
        SourceError: as within, with the keys of the set.
        RunFileError: likewise.
    """
    with _errors_at(f"data.{name}"):
        yield


@contextmanager
def errors_of_source(index: int) -> Iterator[None]:
    """Use around work on the `data` of one source of a mixture: `data.options.path` becomes `data.sources[0].options…`.

    Args:
        index: of the source.

    Raises:
        SourceError: as within, with the keys of the source.
        RunFileError: likewise.
    """
    with _errors_at(f"data.sources[{index}]"):
        yield


@contextmanager
def _errors_at(prefix: str) -> Iterator[None]:
    try:
        yield
    except (SourceError, RunFileError) as fault:
        text = _KEYS.sub(rf"{prefix}.\1", str(fault))
        if text == str(fault):
            raise
        raise type(fault)(text) from fault.__cause__
