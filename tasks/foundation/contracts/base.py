"""The base of everything that is handed from room to room."""

from importlib.metadata import PackageNotFoundError, version
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, from_json

from tasks.foundation.errors import AnotherVersion, BatonError
from tasks.foundation.messages import message, shown

# Keys and messages may hold text of the file, of any length.
_SHOWN_CHARACTERS = 300
_READABLE_SCHEMA = 1
_USE_THE_NEWER = "use the Baton that wrote it, or a newer one, on every machine and in every image of this run"


class Contract(BaseModel):
    """A frozen value; nothing is coerced, and unknown keys are refused where it is made."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_inf_nan="constants")

    def to_json(self) -> bytes:
        """UTF-8 JSON, indented: these files are read by people too."""
        return self.model_dump_json(indent=1).encode()

    @classmethod
    def from_json(
        cls, data: bytes, *, where: str, error: type[BatonError], unknown_keys: Literal["ignore", "forbid"] = "ignore"
    ) -> Self:
        """Parse what another process wrote, which may be a newer Baton.

        Its keys that this version does not know are ignored: a key that changes what the others mean comes with a
        higher `schema_version`.

        Args:
            data: JSON.
            where: the place, for the message.
            error: what to raise where the content is no such contract.
            unknown_keys: forbid them where nothing may be passed over, as in what a stage is asked for.

        Raises:
            AnotherVersion: the schema is newer, or there is an unknown key that may not be ignored.
            BatonError: `error`, naming the place and the first fault.
        """
        try:
            return cls.model_validate_json(data, extra=unknown_keys)
        except ValidationError as fault:
            faults = fault.errors()
            newer = next((one for one in faults if _is_newer(one)), None)
            if newer is not None:
                raise another_version(where, cls, _newer_words(newer)) from fault
            first = faults[0]
            why = shown(first["msg"], _SHOWN_CHARACTERS)
            raise error(f"{where}: not a readable {cls.__name__}: {_key(first)}: {why}") from fault

    @classmethod
    def unknown_keys(cls, data: bytes) -> tuple[str, ...]:
        """Keys of a readable JSON that this version does not know."""
        try:
            cls.model_validate_json(data)
        except ValidationError as fault:
            return tuple(_key(one) for one in fault.errors() if one["type"] == "extra_forbidden")
        return ()


def is_json(data: bytes) -> bool:
    """Whether it can be parsed at all, whatever it says."""
    try:
        from_json(data)
    except ValueError:
        return False
    return True


def another_version(where: str, kind: type[Contract], why: str) -> AnotherVersion:
    """The refusal of what a newer Baton wrote: sound as it is, so nothing is to be deleted or taken out of use.

    Args:
        where: the file.
        kind: what it holds.
        why: what this version cannot read, with its value.
    """
    return AnotherVersion(
        message(
            f"{where}: this {kind.__name__} was written by another version of Baton: {why}. This is Baton "
            f"{_own_version()}, which reads schema_version {_READABLE_SCHEMA}",
            hints=[_USE_THE_NEWER],
        )
    )


def _is_newer(fault: ErrorDetails) -> bool:
    if fault["type"] in {"extra_forbidden", "union_tag_invalid"}:  # an unknown key, an unknown kind of entry
        return True
    found = fault["input"]
    is_schema = bool(fault["loc"]) and fault["loc"][-1] == "schema_version"
    return is_schema and type(found) is int and found > _READABLE_SCHEMA


def _newer_words(fault: ErrorDetails) -> str:
    if fault["type"] == "extra_forbidden":
        return f"{_key(fault)} is an unknown key"
    if fault["type"] == "union_tag_invalid":
        return f"{_key(fault)} is of the unknown kind {shown(repr(fault['ctx']['tag']), _SHOWN_CHARACTERS)}"
    return f"{_key(fault)} is {fault['input']}"


def _key(fault: ErrorDetails) -> str:
    return shown(".".join(str(part) for part in fault["loc"]), _SHOWN_CHARACTERS) or "the whole"


def _own_version() -> str:
    try:
        return version("baton")
    except PackageNotFoundError:  # an image that holds the code only
        return "of unknown version"
