"""The identity of a run as its log has it, read when it is needed: it may be large, and few commands look at it."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

from pydantic import PlainSerializer, WrapValidator

from tasks.foundation.contracts.identity_types import require_types


class LazyIdentity(Mapping[str, Any]):
    """The recorded identity. Its digests are known, and the first look at a key reads the rest.

    Attributes:
        digest: of the whole identity, see `digest_of`.
        in_run_file: of the keys that stand in the run file.
    """

    def __init__(self, read: Callable[[], Mapping[str, Any]], *, digest: str, in_run_file: str) -> None:
        """Read nothing yet.

        Args:
            read: returns the identity; it may raise `RunLogError`.
            digest: of the identity.
            in_run_file: of its keys in the run file.
        """
        self._read = read
        self.digest = digest
        self.in_run_file = in_run_file

    @cached_property
    def _value(self) -> Mapping[str, Any]:
        return self._read()

    def __getitem__(self, key: str) -> Any:
        return self._value[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._value)

    def __len__(self) -> int:
        return len(self._value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LazyIdentity) and other.digest == self.digest:
            return True
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(dict(self))


def digest_of(values: Mapping[str, Any]) -> str:
    """Return the sha256 of JSON with sorted keys, the first 32 digits."""
    return hashlib.sha256(json.dumps(dict(values), sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:32]


def _validated(value: Any, handler: Callable[[Any], Any]) -> Any:
    if isinstance(value, LazyIdentity):
        return value
    identity = dict(handler(value))
    require_types(identity)
    return identity


# For fields of contracts: JSON has the whole identity.
AS_IDENTITY = (WrapValidator(_validated), PlainSerializer(dict))
