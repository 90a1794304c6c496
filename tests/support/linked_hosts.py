"""Hosts of one run as threads of this process, each with a train state of its own, over real links."""

import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.machine.host_link import HostLink
from tests.support.lab import Lab

LONGEST_SECONDS = 60.0


class Group:
    """Hosts that exchange numbers as workers do."""

    def __init__(self, hosts: int) -> None:
        self.numbers: list[Sequence[float]] = [()] * hosts
        self.barrier = threading.Barrier(hosts, timeout=LONGEST_SECONDS)

    def run(self, work: Callable[["Host"], Any]) -> list[Any]:
        """What each host returned or raised, the chief first."""
        return in_threads([partial(work, Host(self, index)) for index in range(len(self.numbers))])


class Host:
    """One host of a group: `Hosts`, and the exchange of an accelerator."""

    def __init__(self, group: Group, index: int) -> None:
        self._group, self._index = group, index
        self.is_chief = index == 0
        self.hosts = len(group.numbers)

    def gather_from_hosts(self, numbers: Sequence[float]) -> Any:
        self._group.numbers[self._index] = numbers
        self._group.barrier.wait()
        gathered = np.array(self._group.numbers, np.float64)
        self._group.barrier.wait()
        return gathered

    def numbers(self, mine: Sequence[float]) -> Any:
        return self.gather_from_hosts(mine)

    def broadcast_from_chief(self, number: int) -> int:
        return int(self.gather_from_hosts([number])[0, 0])


def in_threads(work: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each call returned or raised, in a thread each."""
    outcomes: list[Any] = [None] * len(work)

    def run_one(index: int) -> None:
        try:
            outcomes[index] = work[index]()
        except Exception as fault:  # noqa: BLE001 - compared by the test
            outcomes[index] = fault

    threads = [threading.Thread(target=run_one, args=(index,)) for index in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST_SECONDS)
    return outcomes


def linked(hosts: int) -> list[HostLink]:
    """The links of hosts in one process, the chief's first."""
    pairs = {host: socket.socketpair() for host in range(1, hosts)}
    return [
        HostLink(0, {host: pair[0] for host, pair in pairs.items()}),
        *(HostLink(host, {0: pair[1]}) for host, pair in pairs.items()),
    ]


@contextmanager
def linked_states(lab: Lab, spec: RunSpec, hosts: int) -> Iterator[list[Any]]:
    """The train state of each host, with one replica each, the chief's first; all have the same initial values."""
    from baton.tasks.foundation.dataset.manifest import load_manifest, zero_examples
    from baton.tasks.foundation.machine.devices import acquire
    from baton.tasks.foundation.state.train_state import build_train_state

    links, group, alone = linked(hosts), Group(hosts), acquire(spec.accelerator, None)
    environment = alone.environment.model_copy(update={"hosts": hosts, "replicas": hosts})
    batch = zero_examples(load_manifest(lab.storage, lab.prepare(spec)).features, 4)
    states: list[Any] = []
    for host, link in enumerate(links):
        there = dataclasses.replace(alone, environment=environment, host=host, link=link, exchange=Host(group, host))
        state = build_train_state(spec, code_folder=lab.code, accelerator=there, batch=batch)
        state.replica_variables.gather = lambda host=host: _gather(states, host, group)
        states.append(state)
    try:
        yield states
    finally:
        for link in links:
            link.close()


def _gather(states: Sequence[Any], host: int, group: Group) -> None:
    """What the collective does: each host gets the values that only one host has."""
    group.barrier.wait()
    mine = states[host]
    for leaf in mine.leaves:
        for replica, other in enumerate(states):
            if replica != host and (leaf.per_replica or (leaf.seed and replica == 0)):
                theirs = next(each for each in other.leaves if each.path == leaf.path).components[0]
                part = (
                    mine.replica_variables.first_seed(leaf) if leaf.seed else mine.replica_variables.of(leaf)[replica]
                )
                part.assign(theirs.numpy())
    group.barrier.wait()


def stage_on_all(states: Sequence[Any], home: Any, *, attempt: str = "abc") -> list[Any]:
    """What `stage_checkpoint` returned or raised on each host."""
    from baton.tasks.foundation.checkpoint.write import stage_checkpoint

    homes = home if isinstance(home, list) else [home] * len(states)
    return in_threads(
        [
            lambda state=state, home=home, name=f"{attempt}{host}": stage_checkpoint(state, home, base=7, attempt=name)
            for host, (state, home) in enumerate(zip(states, homes, strict=True))
        ]
    )
