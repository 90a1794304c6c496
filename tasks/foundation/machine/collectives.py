"""The hosts of a run: which of them writes, how they exchange numbers, and how they find out that they are alike.

Each host has a process that runs the same command (see `cluster`). Training, building a model and restoring a
checkpoint use collectives, so every worker does all of them in the same order. Only worker 0, the chief, writes to the
run's home; the others read its log.

All hosts must compute the same: one that has another model, other data or another length of a segment trains along, and
spoils the result or waits forever. So all of them compare what they are about to do: before TensorFlow is imported
(`flows/host_checks.py`), and what only TensorFlow tells, such as the built model, by collectives. All get the same
values, so all refuse with the same message.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from baton.tasks.foundation.contracts.identity import leaves, readable, shorten_to_difference
from baton.tasks.foundation.errors import InvalidInput
from baton.tasks.foundation.text import message

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


# Bytes in a number: integers are exact in float64 below 2**53.
_BYTES: Final = 6
_ABSENT: Final = "absent"
# Longer values are compared by their digest.
_VALUE_CHARACTERS: Final = 4000


class Hosts(Protocol):
    """The hosts that train one run together. `Accelerator` is one implementation, `OneHost` another.

    The exchanges are collective: all hosts call them, in the same order.
    """

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the log; true on exactly one host."""

    @property
    def hosts(self) -> int:
        """Number of hosts."""

    def broadcast_from_chief(self, number: int) -> int:
        """The chief's number, on every host; waits for the chief."""

    def gather_from_hosts(self, numbers: Sequence[float]) -> "npt.NDArray[np.float64]":
        """The numbers of every host, float64 [hosts, len(numbers)]."""

    def require_same(self, values: Mapping[str, Any]) -> None:
        """Refuse to go on, on every host, unless all of them have the same values."""


class OneHost:
    """A single host without an accelerator, for a process whose stages all run in other processes."""

    is_chief = True
    hosts = 1
    agreed = ""

    def broadcast_from_chief(self, number: int) -> int:
        """The number itself."""
        return number

    def gather_from_hosts(self, numbers: Sequence[float]) -> "npt.NDArray[np.float64]":
        """The numbers of the only host, float64 [1, len(numbers)]."""
        import numpy as np  # commands that only read a log need no arrays

        return np.asarray([numbers], np.float64)

    def require_same(self, values: Mapping[str, Any]) -> None:
        """Do nothing."""


def differences_between_hosts(hosts: Hosts, values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return in what the hosts differ, one line for each key; the same on all of them. Collective.

    Args:
        values: what has to be the same on all of them, as JSON values; mappings and lists are compared by their leaves.
    """
    text = json.dumps(comparable(values), sort_keys=True).encode()
    digests = _gather_bytes(hosts, hashlib.sha256(text).digest())
    if len(set(digests)) == 1:
        return ()
    longest = int(hosts.gather_from_hosts([len(text)]).max())
    return differences_between([json.loads(data) for data in _gather_bytes(hosts, text.ljust(longest))])


def comparable(values: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of what has to be the same, as JSON that is bounded."""
    mine = {name: _short(value) for key, below in values.items() for name, value in leaves(key, below)}
    return dict(json.loads(json.dumps(mine, default=str)))


def differences_between(every: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return in what hosts differ, one line for each key.

    Args:
        every: what `comparable` gives on each host.
    """
    names = dict.fromkeys(name for each in every for name in each)
    found = {name: [each.get(name, _ABSENT) for each in every] for name in names}
    return tuple(f"{name}: {values_of_hosts(those)}" for name, those in found.items() if len(set(map(repr, those))) > 1)


def refuse_difference(found: Sequence[str]) -> None:
    """Refuse hosts that differ.

    Raises:
        InvalidInput: they do.
    """
    if found:
        raise InvalidInput(
            message(
                "the hosts of this run differ in settings, data or code",
                details=found,
                hints=[
                    "start the same command with the same run file, code and packages on every host",
                    "let the code read the same environment variables and files on every host",
                ],
            )
        )


def values_of_hosts(values: Sequence[Any]) -> str:
    """The value of each group of hosts that have the same: `48 on host 0, 2; 96 on host 1`."""
    groups: dict[str, list[int]] = {}
    for host, value in enumerate(values):
        groups.setdefault(value if value == _ABSENT else str(readable(value)), []).append(host)
    first, *others = groups
    shown = {first: first}
    for other in others:
        shown[first], shown[other] = shorten_to_difference(first, other)
    return "; ".join(f"{shown[text]} on host {', '.join(map(str, those))}" for text, those in groups.items())


def _short(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= _VALUE_CHARACTERS:
        return value
    return f"{value[:_VALUE_CHARACTERS]}... (sha256 {hashlib.sha256(value.encode()).hexdigest()})"


def _gather_bytes(hosts: Hosts, data: bytes) -> list[bytes]:
    """The bytes of every host, equally many on each."""
    numbers = [int.from_bytes(data[start : start + _BYTES]) for start in range(0, len(data), _BYTES)]
    sizes = [min(_BYTES, len(data) - start) for start in range(0, len(data), _BYTES)]
    of_hosts = hosts.gather_from_hosts(numbers).tolist()
    return [b"".join(int(n).to_bytes(size) for n, size in zip(row, sizes, strict=True)) for row in of_hosts]
