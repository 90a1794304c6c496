"""The name of a dataset, which follows from its source and from every setting that decides its bytes.

Errors about an own set, or about one source of a mixture, name its keys, not those of `data` itself.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tasks.foundation.contracts.data_spec import SetName
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import RunFileError, SourceError
from tasks.prepare_data.sources.base import Source
from tasks.prepare_data.sources.columns import FLOATX, floatx
from tasks.prepare_data.splits import settings_of_split

# Increase this when the same source and settings are written as other bytes.
_FORMAT = 2


def dataset_digest(spec: RunSpec, source: Source, *, arrays_as_given: bool = False) -> str:
    """Return the dataset's name: sha256 over the source's content and all settings that matter, 24 hex digits.

    Args:
        spec: the run file.
        source: the opened source.
        arrays_as_given: name it as it was named when arrays were kept as a function or file gave them, and not made
            what `fit` makes of them.
    """
    decides: dict[str, Any] = {
        "format": _FORMAT,
        "source": spec.data.source,
        "content": source.content,
        "settings": {key: value for key, value in source.settings.items() if key != FLOATX or not arrays_as_given},
        "version": spec.data.version,
        "validation_fraction": spec.data.validation_fraction,
        # These settings change no byte, but the run's checks must have passed.
        "classes": spec.data.classes,
        "allow_nan": spec.data.allow_nan,
        "shard_examples": spec.data.shard_examples,
        "seed": spec.train.seed,
        **settings_of_split(spec.data),
    }
    if ":" in spec.data.source and not arrays_as_given:
        decides["arrays"] = f"as in fit, {floatx()}"
    # Newer settings; without them, the name stays the same.
    if not spec.data.shuffle:
        decides["shuffle"] = False
    if spec.data.batched:
        decides["batched"] = True
    if spec.data.examples is not None:
        decides["examples"] = spec.data.examples
    if spec.data.pad is not None:
        decides["pad"] = {name: rule.model_dump() for name, rule in spec.data.pad.items()}
    if spec.data.pack is not None:
        decides["pack"] = spec.data.pack.model_dump()
    # YAML dates are not JSON, but their text distinguishes them.
    return hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:24]


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
