"""How hosts that hold the same state divide a save between them, and find out that they no longer hold the same.

With MultiWorkerMirroredStrategy every host holds the whole state. So each host saves about 1/N of it, by bytes: its
*share*. A share is a pure function of the state's signature and N, so no host asks another. What only one host has, the
values of its own replicas, it saves itself. What every host keeps for itself, such as the memory of callbacks, the
chief saves.

Hosts hold the same only as long as all of them compute right. So at each save some leaves of each share are compared
with those of another host, and after N saves all of them with those of each other host. Leaves are compared by their
crc32c, which is about as fast as a copy, and which finds every single wrong bit. It is computed from the variables
while the training waits, in parts, so it takes no memory. If two hosts differ, nothing is saved, and all hosts look at
that leaf, so that the odd one among three or more is known.
"""

import heapq
import json
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from baton.tasks.foundation.contracts.checkpoint import replica_key, sorted_keys
from baton.tasks.foundation.errors import HostsDiffer
from baton.tasks.foundation.machine.devices import Accelerator
from baton.tasks.foundation.machine.host_link import HostLink
from baton.tasks.foundation.model.variables import Leaf
from baton.tasks.foundation.state.digest import HOST
from baton.tasks.foundation.storage.transfers import extend_crc32c
from baton.tasks.foundation.text import message

# A host that lives answers within moments: all of them have just left the same collective.
_ANSWER_SECONDS: Final = 600.0
# What an accelerator copies to this host's memory at a time, only to be compared.
_PART_BYTES: Final = 48 << 20
_CRC_TYPE: Final = "<u4"


def owners_of(sizes: Mapping[str, int], *, hosts: int, fixed: Mapping[str, int]) -> dict[str, int]:
    """Decide which host saves each value, so that all save about the same number of bytes.

    The largest value goes first, always to the host that has least. So no host has more than 1/N of all bytes and the
    largest value together, unless fixed values are uneven.

    Args:
        sizes: bytes of each value, by key.
        hosts: how many.
        fixed: the host of each value that only one host can save.

    Returns:
        Key to index of the host.
    """
    loads = [[0, host] for host in range(hosts)]
    for key, host in fixed.items():
        loads[host][0] += sizes[key]
    heapq.heapify(loads)
    found = dict(fixed)
    for key in sorted(sizes.keys() - fixed.keys(), key=lambda key: (-sizes[key], key)):
        least, host = loads[0]
        found[key] = host
        heapq.heapreplace(loads, [least + sizes[key], host])
    return found


class HostShares:
    """The shares of one train state, and what is known of the hosts' agreement.

    Without a link to other hosts, the share of the chief is the whole state.

    Attributes:
        hosts: number of hosts that save.
        host: index of this one among them.
        link: to the others; None if the chief saves alone.
        saves: whether this host saves anything.
        owners: key to the host that saves it, of each value whose size is known. The chief saves the others.
        sizes: bytes of each value, by key; 0 where it is not known.
        mine: keys of the values that this host saves, sorted.
    """

    def __init__(self, leaves: Iterable[Leaf], saved: Mapping[str, Any], accelerator: Accelerator) -> None:
        """Divide a state.

        Args:
            saved: key to variable of everything that a checkpoint holds.
        """
        self.link: HostLink | None = accelerator.link
        self.hosts = 1 if self.link is None else accelerator.hosts
        self.host = 0 if self.link is None else accelerator.host
        self.sizes = {key: bytes_of_variable(variable) for key, variable in saved.items()}
        fixed: dict[str, int] = {}
        apart: set[str] = set()
        for leaf in leaves:
            if leaf.path.startswith(HOST):
                apart.add(leaf.path)
            elif leaf.seed:
                fixed[leaf.path] = 0
            elif leaf.per_replica:
                count = len(leaf.components)  # of this host
                for replica in range(count * accelerator.hosts):
                    fixed[replica_key(leaf.path, replica)] = replica // count if self.hosts > 1 else 0
        sizes = {key: size for key, size in self.sizes.items() if key not in apart}
        self.owners = owners_of(sizes, hosts=self.hosts, fixed=fixed)
        self.saves = self.link is not None or accelerator.is_chief
        mine = sorted(key for key in saved if self.owners.get(key, 0) == self.host)
        self.mine = tuple(mine) if self.saves else ()
        self._pieces = self._divided({key: size for key, size in sizes.items() if key not in fixed})
        # Where addition has no order, as without `train.deterministic`, sound hosts differ too.
        self._compares = self.hosts > 1 and accelerator.environment.deterministic
        self._comparisons = 0
        self._whole: int | None = None
        self._compared: deque[int] = deque(maxlen=self.hosts)

    def _divided(self, sizes: Mapping[str, int]) -> list[list[list[str]]]:
        """What is compared of each host's share, in as many pieces as there are hosts."""
        found: list[list[list[str]]] = []
        for host in range(self.hosts):
            share = {key: size for key, size in sizes.items() if self.owners[key] == host}
            piece_of = owners_of(share, hosts=self.hosts, fixed={})
            found.append([sorted(key for key in share if piece_of[key] == piece) for piece in range(self.hosts)])
        return found

    @property
    def bytes_of_mine(self) -> int:
        """Bytes that this host saves."""
        return sum(self.sizes[key] for key in self.mine)

    def restored(self, step: int) -> None:
        """Note that all hosts hold a checkpoint, whose bytes each of them has verified."""
        self._whole = step
        self._compared.clear()

    def require_same(
        self, mine: Mapping[str, Any], read: Callable[[Sequence[str]], Mapping[str, Any]], *, step: int, where: str = ""
    ) -> dict[str, int]:
        """Compare this state with that of another host. With several hosts, all of them call it at the same step.

        Args:
            mine: key to value, of what this host saves.
            read: reads the values of some keys.
            where: added to the step in an error message.

        Returns:
            The crc32c of the values that were compared and that this host saves, by key.

        Raises:
            HostsDiffer: two hosts differ; raised on all of them, with the same message.
            AcceleratorLost: a host is gone.
        """
        if self.link is None or not self._compares:
            return {}
        turns = turns_of(self._comparisons, self.hosts)
        self._comparisons += 1
        keys, theirs = self._keys_compared(self.host, turns)
        own = {key: crc32c_of(mine[key]) for key in keys}
        found = np.array([*own.values(), *self._crcs(theirs, read)], _CRC_TYPE).tobytes()
        of_hosts = self.link.gather("compared", found, seconds=_ANSWER_SECONDS)
        differing = self.from_chief("differing", None if of_hosts is None else self._first_difference(of_hosts, turns))
        if differing is not None:
            raise HostsDiffer(self._verdict(differing, read, step=step, where=where))
        self._compared.append(step)
        if len(self._compared) == self.hosts:
            self._whole = self._compared[0]
        return own

    def _keys_compared(self, host: int, turns: Sequence[tuple[int, int]]) -> tuple[list[str], list[str]]:
        """The leaves of a host, and those of others, that it looks at."""
        own = [key for piece in sorted({piece for _, piece in turns}) for key in self._pieces[host][piece]]
        theirs = [key for shift, piece in turns for key in self._pieces[(host + shift) % self.hosts][piece]]
        return own, theirs

    def _first_difference(self, of_hosts: Sequence[bytes], turns: Sequence[tuple[int, int]]) -> str | None:
        """The first leaf that differs, in the order of computation; None if none does."""
        own: dict[str, int] = {}
        seen: list[tuple[str, int]] = []
        for host, data in enumerate(of_hosts):
            mine, theirs = self._keys_compared(host, turns)
            crcs = np.frombuffer(data, _CRC_TYPE).tolist()
            own |= zip(mine, crcs[: len(mine)], strict=True)
            seen += zip(theirs, crcs[len(mine) :], strict=True)
        differing = {key for key, crc in seen if crc != own[key]}
        return sorted_keys(differing)[0] if differing else None

    def _crcs(self, keys: Sequence[str], read: Callable[[Sequence[str]], Mapping[str, Any]]) -> Iterator[int]:
        for part in _parts(keys, self.sizes):
            values = read(part)
            yield from (crc32c_of(values[key]) for key in part)

    def from_chief(self, topic: str, text: str | None) -> str | None:
        """Return the chief's text, on every host."""
        if self.link is None:
            return text
        if self.host == 0:
            self.link.send(topic, json.dumps(text).encode())
            return text
        received: str | None = json.loads(self.link.receive(topic, 0, seconds=_ANSWER_SECONDS))
        return received

    def _verdict(self, key: str, read: Callable[[Sequence[str]], Mapping[str, Any]], *, step: int, where: str) -> str:
        """The message of all hosts, after all of them have looked at one leaf."""
        mine = json.dumps([next(self._crcs([key], read)), socket.gethostname()])
        of_hosts = None if self.link is None else self.link.gather("leaf", mine.encode(), seconds=_ANSWER_SECONDS)
        text = None
        if of_hosts is not None:
            crcs, names = zip(*map(json.loads, of_hosts), strict=True)
            text = difference_message(key, crcs, names, at=f"step {step}{where}", whole=self._whole)
        return self.from_chief("verdict", text) or ""


def turns_of(comparison: int, hosts: int) -> list[tuple[int, int]]:
    """Return what is compared now: by how much the other host is shifted, and which piece of its share.

    Args:
        comparison: their number so far. N in a row have each piece of each share compared with each other host.
        hosts: their number N, at least 2.
    """
    every = [(shift, piece) for shift in range(1, hosts) for piece in range(hosts)]
    begin = comparison % hosts * (hosts - 1)
    return every[begin : begin + hosts - 1]


def difference_message(key: str, crcs: Sequence[int], names: Sequence[str], *, at: str, whole: int | None) -> str:
    """Say which host is the odd one: the one that holds something else than most; otherwise, all that differ.

    Args:
        key: of the first leaf that differs.
        crcs: of its value on each host.
        names: of the hosts' machines.
        whole: the last step at which all hosts held the same; None if it is not known.
    """
    groups: dict[int, list[str]] = {}
    for host, (crc, name) in enumerate(zip(crcs, names, strict=True)):
        groups.setdefault(crc, []).append(f"{host} ({name})")
    most, *others = sorted(groups.values(), key=lambda group: -len(group))
    if len(most) > sum(map(len, others)):
        odd = [name for group in others for name in group]
        which = f"host{'s' * (len(odd) > 1)} {', '.join(odd)}"
        headline = f"{which} and the other {len(most)} hosts hold different values of {key}"
        remedy = f"replace {which}, or test its memory and processor"
    else:
        headline = f"hosts {' and '.join(', '.join(group) for group in (most, *others))} hold different values of {key}"
        remedy = "test the memory and the processors of these machines, or replace them"
    known = "nothing was compared before" if whole is None else f"the whole state was the same up to step {whole}"
    return message(
        f"{at}: {headline}, which must be the same on all of them; this state is not committed",
        details=[f"{known}; commits after that may be wrong too"],
        hints=[remedy, "if it happens again on other machines, look for code that sets a variable on one host only"],
    )


def bytes_of_variable(variable: Any) -> int:
    """Size of a variable's value; 0 if its shape is not fixed."""
    return (variable.shape.num_elements() or 0) * int(variable.dtype.size)


def crc32c_of(array: Any) -> int:
    """The crc32c of an array's bytes."""
    return extend_crc32c(0, np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _parts(keys: Sequence[str], sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """The keys in their order, in parts of limited size; a larger value is a part of its own."""
    part: list[str] = []
    size = 0
    for key in keys:
        if part and size + sizes[key] > _PART_BYTES:
            yield part
            part, size = [], 0
        part.append(key)
        size += sizes[key]
    if part:
        yield part
