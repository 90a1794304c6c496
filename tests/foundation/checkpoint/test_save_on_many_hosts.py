"""All hosts wait for the chief's save together, and all of them learn how it ended."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tasks.foundation.checkpoint.save import AsyncSaves, wait_for_save
from tasks.foundation.contracts.log_entry import Commit, Entry
from tasks.foundation.errors import AcceleratorLost, NonFinite, StaleWriter
from tasks.foundation.log.fold import fold
from tasks.foundation.machine.hosts import OneHost
from tests.support.small_logs import origin, ref

LONGEST_SECONDS = 60.0


class Group:
    """Hosts of one run in threads; they exchange numbers as workers do."""

    def __init__(self, hosts: int) -> None:
        self.numbers: list[Sequence[float]] = [()] * hosts
        self.barrier = threading.Barrier(hosts, timeout=LONGEST_SECONDS)

    def run(self, work: Callable[["Host"], Any]) -> list[Any]:
        """What each host returned or raised, the chief first."""
        outcomes: list[Any] = [None] * len(self.numbers)

        def run_one(index: int) -> None:
            try:
                outcomes[index] = work(Host(self, index))
            except Exception as fault:  # noqa: BLE001 - compared by the test
                outcomes[index] = fault

        threads = [threading.Thread(target=run_one, args=(index,)) for index in range(len(outcomes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONGEST_SECONDS)
        return outcomes


class Host:
    """One host of a group."""

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

    def broadcast_from_chief(self, number: int) -> int:
        return int(self.gather_from_hosts([number])[0, 0])


def saving(commit: Callable[..., Entry]) -> Callable[[Host], Any]:
    """Each host saves step 7 and waits for it; only the chief has a save."""

    def work(host: Host) -> Any:
        saves = AsyncSaves()
        if host.is_chief:
            saves.begin(lambda: ref(7))
            saves.commit(commit)
        return wait_for_save(saves, host)

    return work


def entry_12(*_: object) -> Entry:
    body = Commit(checkpoint=ref(7), parent=None, exit_reason="interval")
    return Entry(number=12, time="", attempt="a", body=body, head=fold(fold(None, origin()), body))


def fail(fault: Exception) -> Callable[..., Entry]:
    def commit(*_: object) -> Entry:
        raise fault

    return commit


def test_every_host_learns_the_number_of_the_entry() -> None:
    assert Group(3).run(saving(entry_12)) == [12, 12, 12]


def test_nothing_in_flight_is_no_entry() -> None:
    assert Group(2).run(lambda host: wait_for_save(AsyncSaves(), host)) == [None, None]
    assert wait_for_save(None, OneHost()) is None


def test_every_host_rewinds_from_weights_that_are_not_finite() -> None:
    fault = NonFinite("step 7: dense/kernel holds NaN", step=7)
    chief, *others = Group(3).run(saving(fail(fault)))
    assert chief is fault
    assert [(type(other), other.step) for other in others] == [(NonFinite, 7)] * 2


def test_another_failure_of_the_chief_ends_every_host() -> None:
    fault = StaleWriter("the tip has moved")
    chief, other = Group(2).run(saving(fail(fault)))
    assert chief is fault
    assert isinstance(other, AcceleratorLost)
    with pytest.raises(AcceleratorLost, match="the chief could not commit"):
        raise other
