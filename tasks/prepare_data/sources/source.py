"""The interface of a source, and the parsing of its options."""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError

from tasks.foundation.contracts.base import Contract
from tasks.foundation.contracts.dataset import Feature, RangeLayout, ShardRecord
from tasks.foundation.dataset.features import Array
from tasks.foundation.errors import RunFileError

# The example's position in the source, for messages, and the example as a user would yield it, or a `Row`.
LocatedExample = tuple[str, object]


@dataclass(frozen=True, slots=True)
class Row:
    """An example that was taken from whole arrays or from a batch: named arrays, as `features.flatten` returns them."""

    arrays: dict[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Consecutive records of a file; all ranges, in order, form the whole source."""

    path: str  # absolute path or address of the file
    begin: int  # offset of the first byte
    size: int  # bytes
    crc32c: str
    records: int
    layout: RangeLayout | None = None  # None: of a TFRecord file

    def as_shard(self, first: int = 0) -> ShardRecord:
        """Return the manifest's entry for it; `first` is the index of its first record in the source."""
        return ShardRecord(
            path=self.path,
            begin=self.begin,
            size=self.size,
            crc32c=self.crc32c,
            first=first,
            records=self.records,
            examples=self.records,
            layout=self.layout,
        )


class ExampleChecker(Protocol):
    """Checks the examples of ranges: `example_checks.Checker`."""

    def check(self, where: str, example: object) -> object:
        """Check one example; `where` is its position in the source."""

    def check_rows(self, where: Callable[[int], str], arrays: Mapping[str, Array], features: Sequence[Feature]) -> None:
        """Check many at once; `where` says the position of one, given its index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InPlace:
    """Examples in files, to be read from there and not copied."""

    features: tuple[Feature, ...]  # in the order of the flattened example
    # Reads all files, and checks each example with its first argument. The second argument is the number of records per
    # range; None: about as many bytes as a shard.
    ranges: Callable[[ExampleChecker, int | None], Iterator[Range]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Examples that can be read once, in order, without holding all of them in memory.

    `content` and `settings` together determine every example, so they name the dataset.
    """

    content: str  # sha256 of the data, or a name for data that cannot change
    settings: Mapping[str, Any]  # options that affect the examples
    origin: Mapping[str, str]  # for the manifest: files and their checksums
    length: int | None  # number of examples; None if it is unknown before reading
    # Call it, and take its examples, within `surroundings`.
    read: Callable[[], Iterator[LocatedExample]]
    surroundings: Callable[[], AbstractContextManager[None]] = nullcontext
    in_place: InPlace | None = None
    # Of features that are copied: the texts whose positions are the values.
    vocabularies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Called after an example is refused; raises DamagedInTransit if its bytes were damaged in transit.
    confirm: Callable[[], None] = lambda: None


class Options(Contract):
    """`data.options` of a built-in source."""


OptionsT = TypeVar("OptionsT", bound=Options)


def parse_options(model: type[OptionsT], options: Mapping[str, Any], *, source: str) -> OptionsT:
    """Parse the options of a built-in source.

    Args:
        model: the source's options.
        options: as in the run file.
        source: its name, for messages.

    Raises:
        RunFileError: an option is unknown, missing or has another type; names the key, the value and the remedy.
    """
    known = {field.alias or name: field for name, field in model.model_fields.items()}
    for key in options:
        if key not in known:
            raise RunFileError(
                f"data.options.{key}: {options[key]!r}: the source {source} does not have this option; "
                f"{suggestion(key, known)}"
            )
    try:
        return model.model_validate(dict(options))
    except ValidationError as fault:
        first = fault.errors()[0]
        if not first["loc"]:  # options that do not go together; the error names them
            raise RunFileError(f"data.options.{first['ctx']['error']}") from fault
        key = str(first["loc"][0])
        remedy = known[key].description
        path, value, missing = _find_option(options, first["loc"])
        if missing:
            raise RunFileError(f"data.options.{path} is missing: the source {source} needs it: {remedy}") from fault
        raise RunFileError(f"data.options.{path}: {value!r}: {first['msg']}; {key} is {remedy}") from fault


def _find_option(options: Mapping[str, Any], loc: tuple[int | str, ...]) -> tuple[str, object, bool]:
    """Return an error's key, the value there, and whether it is missing; `loc` may continue into pydantic's types."""
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
    """Return the most similar name, if any, and all known names."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    meant = f"did you mean {close[0]}? " if close else ""
    return f"{meant}available: {', '.join(names) or 'none'}"
