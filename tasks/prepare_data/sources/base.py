"""What every source is, and how its options are read."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import ValidationError

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.dataset import Feature
from tasks.foundation.errors import RunFileError

# Where the example stands, for messages, and the example as the user would yield it.
Located = tuple[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Some records of a TFRecord file, one after the other; a range after the other, they are the whole source."""

    path: str  # of the file, absolute, or its address
    begin: int  # offset in it
    size: int  # bytes
    crc32c: str
    records: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlace:
    """Examples that are TFRecord files already, to be read from there and not to be copied."""

    features: tuple[Feature, ...]  # in the order of the flattened example
    # Reads all files through; gives each example to its first argument, to be looked at. Ranges hold as many records as
    # the second argument says; None: about as many bytes as a shard.
    ranges: Callable[[Callable[[str, object], object], int | None], Iterator[Range]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Examples that can be read once, in order, without holding them all.

    `content` and `settings` together decide every example: the dataset is named by them.
    """

    content: str  # sha256 of what is read, or a name for it where it cannot change
    settings: Mapping[str, Any]  # options that decide what is made of it
    origin: Mapping[str, str]  # for the manifest: files and their checksums
    length: int | None  # examples, where they can be counted without reading
    read: Callable[[], Iterator[Located]]
    in_place: InPlace | None = None
    # Call this when an example was refused: raises DamagedInTransit if its bytes were damaged on the way.
    confirm: Callable[[], None] = lambda: None


class Options(Contract):
    """`data.options` of a built-in source."""


OptionsT = TypeVar("OptionsT", bound=Options)


def parse_options(model: type[OptionsT], options: Mapping[str, Any], *, source: str) -> OptionsT:
    """The options of a built-in source.

    Args:
        model: the options that it knows.
        options: as they stand in the run file.
        source: its name, for messages.

    Raises:
        RunFileError: an option is unknown, missing or of another type; names the key, the value and the remedy.
    """
    known = {field.alias or name: field for name, field in model.model_fields.items()}
    for key in options:
        if key not in known:
            raise RunFileError(
                f"data.options.{key}: {options[key]!r}: the source {source} has no such option; "
                f"{suggestion(key, known)}"
            )
    try:
        return model.model_validate(dict(options))
    except ValidationError as fault:
        first = fault.errors()[0]
        key = str(first["loc"][0])
        remedy = known[key].description
        path, value, missing = _place(options, first["loc"])
        if missing:
            raise RunFileError(f"data.options.{path} is missing: the source {source} needs it: {remedy}") from fault
        raise RunFileError(f"data.options.{path}: {value!r}: {first['msg']}; {key} is {remedy}") from fault


def _place(options: Mapping[str, Any], loc: tuple[int | str, ...]) -> tuple[str, object, bool]:
    """The key that a fault is about, the value there, and whether none is; `loc` may go on into pydantic's own."""
    keys: list[str] = []
    value: object = options
    for part in loc:
        if not isinstance(value, Mapping):
            break
        keys.append(str(part))
        if part not in value:
            return ".".join(keys), None, True
        value = value[part]
    return ".".join(keys), value, False


def suggestion(name: str, known: Iterable[str]) -> str:
    """What was perhaps meant, and all that can be."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"{meant}it knows: {', '.join(names) or 'none'}"
