"""The hosts of a run: which of them writes, how they exchange numbers, and how they find out that they are alike.

Each host has a process that runs the same command (MultiWorkerMirroredStrategy from `TF_CONFIG`, which is read here
without TensorFlow). Training, building a model and restoring a checkpoint use collectives, so every worker does all of
them in the same order. Only worker 0, the chief, writes to the run's home; the others read its log.

All hosts must compute the same: one that has another model, other data or another length of a segment trains along, and
spoils the result or waits forever. So all of them compare what they are about to do with what the others are, once
before the first collective of their work and once when the model is built. All get the same values, so all refuse with
the same message.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from tasks.foundation.contracts.identity import leaves, readable, shorten_to_difference
from tasks.foundation.contracts.placement import AcceleratorSpec
from tasks.foundation.errors import AcceleratorError, InvalidInput
from tasks.foundation.messages import message

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


_EXAMPLE = (
    '{"cluster": {"worker": ["host-0:2222", "host-1:2222"]}, "task": {"type": "worker", "index": 0}}, where index '
    "differs on each host"
)
# Bytes in a number: integers are exact in float64 below 2**53.
_BYTES: Final = 6
_ABSENT: Final = "absent"
# Longer values are compared by their digest.
_VALUE_CHARACTERS: Final = 4000


@dataclass(frozen=True, slots=True)
class Cluster:
    """The content of `TF_CONFIG`.

    Attributes:
        addresses: host:port of every worker, the chief's first.
        host: index of this process in `addresses`.
    """

    addresses: tuple[str, ...]
    host: int


def cluster_of(environment: Mapping[str, str]) -> Cluster:
    """Read `TF_CONFIG`.

    Args:
        environment: the process's environment variables.

    Raises:
        AcceleratorError: it is not set, or is not a cluster of workers that includes this process.
    """
    text = environment.get("TF_CONFIG")
    if not text:
        raise AcceleratorError(
            f"accelerator.kind = multi_worker needs TF_CONFIG in the environment; set it to {_EXAMPLE}"
        )
    try:
        config = json.loads(text)
        cluster, task = dict(config["cluster"]), dict(config["task"])
        kind, index = str(task["type"]), int(task["index"])
        jobs = {name: [str(address) for address in addresses] for name, addresses in cluster.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as fault:
        raise AcceleratorError(
            f"TF_CONFIG = {text[:200]} cannot be read ({type(fault).__name__}: {fault}); set it to {_EXAMPLE}"
        ) from fault
    others = sorted(jobs.keys() - {"chief", "worker"})
    if others:
        raise AcceleratorError(f"TF_CONFIG has jobs {', '.join(others)}; use only workers and at most one chief")
    if len(jobs.get("chief", [])) > 1:
        raise AcceleratorError(
            f"TF_CONFIG has {len(jobs['chief'])} chiefs; name at most one (without one, worker 0 is the chief)"
        )
    if not 0 <= index < len(jobs.get(kind, [])):
        raise AcceleratorError(
            f"TF_CONFIG makes this process {kind} {index}, but lists {len(jobs.get(kind, []))} of that type; "
            "give each host a different index, from 0"
        )
    chiefs, workers = jobs.get("chief", []), jobs.get("worker", [])
    addresses = (*chiefs, *workers)
    if len(set(addresses)) != len(addresses):
        raise AcceleratorError(
            f"TF_CONFIG names an address twice: {', '.join(addresses)}; give each worker a different address"
        )
    return Cluster(addresses=addresses, host=index if kind == "chief" else len(chiefs) + index)


def is_chief(spec: AcceleratorSpec, environment: Mapping[str, str]) -> bool:
    """Whether this process writes to the run's home. Needs no TensorFlow.

    Args:
        spec: `accelerator` of the run file.
        environment: the process's environment variables.

    Raises:
        AcceleratorError: see `cluster_of`.
    """
    return spec.kind != "multi_worker" or cluster_of(environment).host == 0


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
        hosts: the hosts of the run.
        values: what has to be the same on all of them, as JSON values; mappings and lists are compared by their leaves.
    """
    mine = {name: value for key, below in values.items() for name, value in leaves(key, below)}
    text = json.dumps({name: _short(value) for name, value in mine.items()}, sort_keys=True, default=str).encode()
    digests = _gather_bytes(hosts, hashlib.sha256(text).digest())
    if len(set(digests)) == 1:
        return ()
    longest = int(hosts.gather_from_hosts([len(text)]).max())
    every = [json.loads(data) for data in _gather_bytes(hosts, text.ljust(longest))]
    names = dict.fromkeys(name for each in every for name in each)
    found = {name: [each.get(name, _ABSENT) for each in every] for name in names}
    return tuple(f"{name}: {_words(those)}" for name, those in found.items() if len(set(map(repr, those))) > 1)


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
                hints=["start the same command with the same run file, code and packages on every host"],
            )
        )


def _words(values: Sequence[Any]) -> str:
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
