"""What a change of a run-file key means for a run that has begun. Every field of `RunSpec` carries one `ChangeClass`.

An identity key decides what the log records of the run (identity.py): a change is refused, or the user accepts it by
name and it is logged. An operational key may change freely. The environment is recorded too; a change of it is reported
and logged.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pydantic.fields import FieldInfo

from tasks.foundation.contracts.base import Contract


@dataclass(frozen=True, slots=True)
class ChangeClass:
    """What a change of one key means.

    Attributes:
        kind: the class.
        why: the reason for the class, in a few words.
        decides: for an identity key, the recorded keys that it decides, alone or with others.
    """

    kind: Literal["identity", "operational", "environment"]
    why: str
    decides: tuple[str, ...] = ()


def identity(why: str, *decides: str) -> ChangeClass:
    """The class of a key that decides the recorded keys `decides`."""
    return ChangeClass("identity", why, decides)


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


def change_class_of(field: FieldInfo) -> ChangeClass:
    """The class that a field carries.

    Raises:
        ValueError: the field carries none, or more than one.
    """
    found = [each for each in field.metadata if isinstance(each, ChangeClass)]
    if len(found) != 1:
        raise ValueError(f"a field of the run file carries {len(found)} change classes; give it one ({field!r})")
    return found[0]
