"""The base class of all contracts: the values that stages, processes and files exchange.

Strings that become paths or file names come from files that others can write, so each has a strict pattern. Every field
of `RunSpec` carries one `ChangeClass`, which says what another value means for a run that has begun. An identity key
decides what the log records of the run (identity.py): a change is refused, or the user accepts it by name and it is
logged. An operational key may change freely. The environment is recorded too; a change of it is reported and logged.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, from_json

from baton.tasks.foundation.errors import AnotherVersion, BatonError
from baton.tasks.foundation.text import abridged, message, shown, visible

# The public index has another project with the name `baton`.
_DISTRIBUTION = "baton-relay"
# Keys and messages may quote text of any length from the file.
_SHOWN_CHARACTERS = 300
_SHOWN_KEYS = 20
_FORMAT = 1
_EARLIER_FORMATS = "28ffee9"  # the last revision that reads them
_SMALL_BYTES = 256 << 10
_LARGEST = 2**63 - 1
_USE_NEWER_VERSION = (
    "use the version of Baton that wrote it, or a newer one, on every machine and in every image of this run"
)


def baton_version() -> str | None:
    """Return the installed version of Baton; None where only its source files are, as in some images."""
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return None


def _adapt(schema: Any) -> None:
    """Change pydantic's schema of a contract, for files that are made to fill the memory.

    Validation stops at the first wrong item of a list or mapping, so there is no error for each of a million. A list
    may be read as a tuple, as JSON's are, so that `Contract.parse` can take values instead of JSON. An integer has 64
    bits: with others, system calls and divisions fail.
    """
    if isinstance(schema, dict):
        if schema.get("type") == "int" and "lt" not in schema:
            schema.setdefault("le", _LARGEST)
        if schema.get("type") == "int" and "gt" not in schema:
            schema.setdefault("ge", -_LARGEST)
        if schema.get("type") in {"list", "tuple", "set", "frozenset", "dict"}:
            schema["fail_fast"] = True
        if schema.get("type") == "tuple":
            schema["strict"] = False
        for part in schema.values():
            _adapt(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            _adapt(part)


class Contract(BaseModel):
    """A frozen value. Types are not coerced, and unknown keys are refused at construction."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_inf_nan="constants")

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        """See `_adapt`."""
        schema = handler(source)
        _adapt(schema)
        return schema

    @classmethod
    def parse(cls, data: bytes, *, extra: Literal["ignore", "forbid", "allow"]) -> Self:
        """Parse JSON.

        Args:
            extra: what becomes of unknown keys.

        Raises:
            ValidationError: it is no such value.
        """
        if len(data) <= _SMALL_BYTES:
            return cls.model_validate_json(data, extra=extra)
        # Each error of JSON has a copy of the value that it is about, such as the whole file for each missing key.
        try:
            value = from_json(data)
        except ValueError:
            return cls.model_validate_json(data, extra=extra)  # says what is wrong with the JSON
        return cls.model_validate(value, extra=extra)

    def to_json(self) -> bytes:
        """Return indented UTF-8 JSON, because people read these files too."""
        return self.model_dump_json(indent=1).encode()

    @classmethod
    def from_json(
        cls, data: bytes, *, where: str, error: type[BatonError], unknown_keys: Literal["ignore", "forbid"] = "ignore"
    ) -> Self:
        """Parse JSON that another process wrote, perhaps with a newer version of Baton.

        Unknown keys are ignored: a key that changes the meaning of the others comes with a higher `format`. Files of
        revisions before 1.0 have `schema_version` in its place, or neither.

        Args:
            where: the file or source, for the message.
            error: class of the error for invalid content.
            unknown_keys: "forbid" where no key may be ignored, as in the call of a stage.

        Raises:
            AnotherVersion: the format is newer, or of a revision before 1.0, or an unknown key is forbidden.
            BatonError: an `error` with `where` and the first problem.
        """
        try:
            found = cls.parse(data, extra=unknown_keys)
        except ValidationError as invalid:
            if _has_earlier_format(data):
                raise _earlier_format(where, cls) from invalid
            problems = invalid.errors(include_url=False, include_input=False)  # the input may be the whole file
            for one in problems:
                words = _newer_words(one, data)
                if words is not None:
                    raise another_version(where, cls, words) from invalid
            first = problems[0]
            why = shown(first["msg"], _SHOWN_CHARACTERS)
            raise error(f"{where}: not a readable {_title(cls)}: {_key(first)}: {why}") from invalid
        if "format" in cls.model_fields and "format" not in found.model_fields_set:
            raise _earlier_format(where, cls)
        return found

    @classmethod
    def unknown_keys(cls, data: bytes) -> tuple[str, ...]:
        """Return the first few keys of valid JSON that this version does not know."""
        try:
            found = cls.parse(data, extra="allow")
        except ValidationError:
            return ()
        return tuple(islice(_extra_keys(found), _SHOWN_KEYS))


def _extra_keys(value: object, above: str = "") -> Iterator[str]:
    """Yield the keys of contracts, at any depth, that their fields do not have."""
    if isinstance(value, Contract):
        yield from (shown(f"{above}{key}", _SHOWN_CHARACTERS) for key in value.model_extra or {})
        parts: Iterable[tuple[object, object]] = ((name, getattr(value, name)) for name in type(value).model_fields)
    elif isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, tuple):
        parts = enumerate(value)
    else:
        return
    for key, part in parts:
        yield from _extra_keys(part, f"{above}{key}.")


def another_version(where: str, kind: type[Contract], why: str) -> AnotherVersion:
    """Return the error for a file of a newer version of Baton, which is valid and must not be deleted.

    Args:
        why: what this version cannot read, with its value.
    """
    return AnotherVersion(
        message(
            f"{where}: this {_title(kind)} was written by another version of Baton: {why}. This is Baton "
            f"{_own_version()}, which reads format {_FORMAT}",
            hints=[_USE_NEWER_VERSION],
        )
    )


def _title(kind: type[Contract]) -> str:
    return kind.model_config.get("title") or kind.__name__


def _has_earlier_format(data: bytes) -> bool:
    try:
        value = from_json(data)
    except ValueError:
        return False
    return isinstance(value, dict) and "schema_version" in value and "format" not in value


def _earlier_format(where: str, kind: type[Contract]) -> AnotherVersion:
    return AnotherVersion(
        f"{where}: this {_title(kind)} was written by a revision of Baton before 1.0, and revision {_EARLIER_FORMATS} "
        "is the last that reads it"
    )


def _newer_words(problem: ErrorDetails, data: bytes) -> str | None:
    """What a newer version of Baton wrote; None if a problem is another one."""
    if problem["type"] == "extra_forbidden":
        return f"{_key(problem)} is an unknown key"
    if problem["type"] == "union_tag_invalid":
        kind_of_entry = str(problem["ctx"]["tag"])
        if not kind_of_entry.isidentifier():  # no version calls one so
            return None
        return f"{_key(problem)} has the unknown kind {shown(repr(kind_of_entry), _SHOWN_CHARACTERS)}"
    if not problem["loc"] or problem["loc"][-1] != "format":
        return None
    found = _at(from_json(data), problem["loc"])
    return f"{_key(problem)} is {found}" if type(found) is int and found > _FORMAT else None


def _at(value: Any, place: tuple[int | str, ...]) -> object:
    """The value at a place of an error; None if the place has names that are not in the JSON, such as a union's."""
    for part in place:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _key(problem: ErrorDetails) -> str:
    return shown(".".join(str(part) for part in problem["loc"]), _SHOWN_CHARACTERS) or "the whole value"


def _own_version() -> str:
    return baton_version() or "of unknown version"


_NAME = r"[\w.=+@-]{1,255}"
_FILE_NAME = re.compile(rf"(?!\.){_NAME}")
_ATTEMPT = re.compile(r"[A-Za-z0-9_-]{1,128}")
_CHECKPOINT = re.compile(rf"checkpoints/(?!\.){_NAME}")
_DATASET = re.compile(rf"datasets/(?!\.){_NAME}")
_ANSWER = re.compile(rf"answers/(?!\.){_NAME}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_REFUSED = "refused_name"
_SHOWN_OF_A_NAME = 120
_SHARD_CHARACTERS = 4096  # long enough for the address of an external file


def _matching(pattern: re.Pattern[str], what: str) -> AfterValidator:
    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise _refusal(text, what)
        return text

    return AfterValidator(check)


def _shard(path: str) -> str:
    """Accept a file name in the dataset's folder, or the absolute path or address of an external file."""
    if path.startswith("/") or "://" in path:  # only read, and verified with the checksum in the manifest
        if _CONTROL.search(path) or len(path) > _SHARD_CHARACTERS:
            raise _refusal(path, "a file path: it is too long, or has control characters")
    elif not _FILE_NAME.fullmatch(path):
        raise _refusal(path, "the name of a shard in the dataset's folder")
    return path


def is_refused_name(fault: BaseException | None) -> bool:
    """Whether an error is about a name that no version of Baton writes."""
    return isinstance(fault, ValidationError) and any(each["type"] == _REFUSED for each in fault.errors())


def _refusal(name: str, what: str) -> PydanticCustomError:
    shown = repr(abridged(visible(name), _SHOWN_OF_A_NAME))
    why = f"{shown} is not {what}; no version of Baton writes such a name"
    return PydanticCustomError(_REFUSED, "{why}", {"why": why})


FileName = Annotated[str, _matching(_FILE_NAME, "a file name")]
AttemptId = Annotated[str, _matching(_ATTEMPT, "an attempt id: letters, digits, '-' and '_'")]
CheckpointPath = Annotated[str, _matching(_CHECKPOINT, "the folder of a checkpoint: checkpoints/<name>")]
DatasetPath = Annotated[str, _matching(_DATASET, "the folder of a dataset: datasets/<name>")]
AnswerPath = Annotated[str, _matching(_ANSWER, "a file of a stage's result: answers/<name>")]
ShardPath = Annotated[str, AfterValidator(_shard)]


@dataclass(frozen=True, slots=True)
class ChangeClass:
    """What a change of one key means.

    Attributes:
        kind: the class.
        why: the reason for the class, in a few words.
        decides: for an identity key, the recorded keys of other names that it decides, alone or with others.
        accepted: for an identity key that is recorded under its own name, the effect of an accepted change.
        plain: whether its value is recorded as it is in the run file.
    """

    kind: Literal["identity", "operational", "environment"]
    why: str
    decides: tuple[str, ...] = ()
    accepted: str = ""
    plain: bool = False


FROM_THAT_STEP = "applies from that step on"
CARRIED = (
    "applies from that step on: weights, and all that means the same, keep their values; other slots, metrics and "
    "seeds begin fresh"
)
OTHER_BATCHES = "changes the data order from that step on: examples of the current epoch may repeat or be left out"


def identity(why: str, *decides: str, accepted: str = "", plain: bool = False) -> ChangeClass:
    """The class of a key that decides recorded keys; see `ChangeClass`."""
    return ChangeClass("identity", why, decides, accepted, plain)


def operational(why: str) -> ChangeClass:
    """The class of a key that may change freely."""
    return ChangeClass("operational", why)


def environment(why: str) -> ChangeClass:
    """The class of a key whose change is reported and logged."""
    return ChangeClass("environment", why)


def keys_of(contract: type[Contract], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key that holds a value, in the order of the contract, as (dotted name, field)."""
    for name, field in contract.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Contract):
            yield from keys_of(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


_FORMS = "name a function as file.py:function or package.module:function"


def check_code_reference(reference: str) -> str:
    """Check the form of a reference; the file is relative to the run file's folder.

    Raises:
        ValueError: it has neither form.
    """
    module, separator, name = reference.partition(":")
    if not separator or not module or not name.isidentifier():
        raise ValueError(_FORMS)
    if module.endswith(".py"):
        if PurePosixPath(module).is_absolute():
            raise ValueError("name the file relative to the run file's folder")
        if not PurePosixPath(module).stem.isidentifier():
            raise ValueError("the file's name must be a Python name and .py, as my_model.py")
    elif not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(_FORMS)
    return reference


CodeReference = Annotated[str, AfterValidator(check_code_reference)]
