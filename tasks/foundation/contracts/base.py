"""The base class of all contracts: the values that stages, processes and files exchange."""

from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, from_json

from tasks.foundation.errors import AnotherVersion, BatonError
from tasks.foundation.messages import message, shown
from tasks.foundation.version import baton_version

# Keys and messages may quote text of any length from the file.
_SHOWN_CHARACTERS = 300
_FIRST_SCHEMA = 1
_USE_NEWER_VERSION = (
    "use the version of Baton that wrote it, or a newer one, on every machine and in every image of this run"
)


class Contract(BaseModel):
    """A frozen value. Types are not coerced, and unknown keys are refused at construction."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, ser_json_inf_nan="constants")
    readable_schema: ClassVar[int] = _FIRST_SCHEMA

    def to_json(self) -> bytes:
        """Return indented UTF-8 JSON, because people read these files too."""
        return self.model_dump_json(indent=1).encode()

    @classmethod
    def from_json(
        cls, data: bytes, *, where: str, error: type[BatonError], unknown_keys: Literal["ignore", "forbid"] = "ignore"
    ) -> Self:
        """Parse JSON that another process wrote, perhaps with a newer version of Baton.

        Unknown keys are ignored: a key that changes the meaning of the others comes with a higher `schema_version`.

        Args:
            data: the JSON.
            where: the file or source, for the message.
            error: class of the error for invalid content.
            unknown_keys: "forbid" where no key may be ignored, as in the call of a stage.

        Raises:
            AnotherVersion: the schema is newer, or an unknown key is forbidden.
            BatonError: an `error` with `where` and the first problem.
        """
        try:
            return cls.model_validate_json(data, extra=unknown_keys)
        except ValidationError as invalid:
            problems = invalid.errors()
            newer = next((one for one in problems if _is_newer(one, cls)), None)
            if newer is not None:
                raise another_version(where, cls, _newer_words(newer)) from invalid
            first = problems[0]
            why = shown(first["msg"], _SHOWN_CHARACTERS)
            raise error(f"{where}: not a readable {_title(cls)}: {_key(first)}: {why}") from invalid

    @classmethod
    def unknown_keys(cls, data: bytes) -> tuple[str, ...]:
        """Return the keys of valid JSON that this version does not know."""
        try:
            cls.model_validate_json(data)
        except ValidationError as invalid:
            return tuple(_key(one) for one in invalid.errors() if one["type"] == "extra_forbidden")
        return ()


def is_json(data: bytes) -> bool:
    """Return whether the bytes are valid JSON."""
    try:
        from_json(data)
    except ValueError:
        return False
    return True


def another_version(where: str, kind: type[Contract], why: str) -> AnotherVersion:
    """Return the error for a file of a newer version of Baton, which is valid and must not be deleted.

    Args:
        where: the file.
        kind: the contract in the file.
        why: what this version cannot read, with its value.
    """
    return AnotherVersion(
        message(
            f"{where}: this {_title(kind)} was written by another version of Baton: {why}. This is Baton "
            f"{_own_version()}, which reads schema_version {_readable_words(kind)}",
            hints=[_USE_NEWER_VERSION],
        )
    )


def _title(kind: type[Contract]) -> str:
    return kind.model_config.get("title") or kind.__name__


def _readable_words(kind: type[Contract]) -> str:
    newest = kind.readable_schema
    return str(newest) if newest == _FIRST_SCHEMA else f"{_FIRST_SCHEMA} to {newest}"


def _is_newer(problem: ErrorDetails, kind: type[Contract]) -> bool:
    if problem["type"] in {"extra_forbidden", "union_tag_invalid"}:  # an unknown key, or an unknown kind of entry
        return True
    found = problem["input"]
    if not problem["loc"] or problem["loc"][-1] != "schema_version":
        return False
    readable = kind.readable_schema if len(problem["loc"]) == 1 else _FIRST_SCHEMA
    return type(found) is int and found > readable


def _newer_words(problem: ErrorDetails) -> str:
    if problem["type"] == "extra_forbidden":
        return f"{_key(problem)} is an unknown key"
    if problem["type"] == "union_tag_invalid":
        return f"{_key(problem)} has the unknown kind {shown(repr(problem['ctx']['tag']), _SHOWN_CHARACTERS)}"
    return f"{_key(problem)} is {problem['input']}"


def _key(problem: ErrorDetails) -> str:
    return shown(".".join(str(part) for part in problem["loc"]), _SHOWN_CHARACTERS) or "the whole value"


def _own_version() -> str:
    return baton_version() or "of unknown version"
