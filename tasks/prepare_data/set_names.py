"""Errors about an own validation or test set name its keys, not those of the training data."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from tasks.foundation.contracts.evaluation_sets import SetName
from tasks.foundation.errors import RunFileError, SourceError

_KEYS = re.compile(r"\bdata\.(source|options|version|batched)\b")


@contextmanager
def errors_of_set(name: SetName) -> Iterator[None]:
    """Use around work on the `data` of an own set: `data.options.path` in an error becomes `data.test.options.path`.

    Args:
        name: the set.

    Raises:
        SourceError: as within, with the keys of the set.
        RunFileError: likewise.
    """
    try:
        yield
    except (SourceError, RunFileError) as fault:
        text = _KEYS.sub(rf"data.{name}.\1", str(fault))
        if text == str(fault):
            raise
        raise type(fault)(text) from fault.__cause__
