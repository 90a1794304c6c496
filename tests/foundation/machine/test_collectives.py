"""The only host of a run, and several that compare what they are about to do."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from baton.tasks.foundation.errors import InvalidInput
from baton.tasks.foundation.machine.collectives import Hosts, OneHost, differences_between_hosts, refuse_difference


def test_one_host_is_the_chief_and_exchanges_with_itself() -> None:
    hosts: Hosts = OneHost()
    assert (hosts.is_chief, hosts.hosts, hosts.broadcast_from_chief(7)) == (True, 1, 7)
    numbers = hosts.gather_from_hosts([1, 2.5])
    assert (numbers.dtype, numbers.tolist()) == (np.float64, [[1.0, 2.5]])


class InThreads(OneHost):
    """One of several hosts, each in a thread; a gather waits for all of them."""

    def __init__(self, host: int, sent: list[Sequence[float]], barrier: Barrier) -> None:
        self.host, self.sent, self.barrier = host, sent, barrier

    def gather_from_hosts(self, numbers: Sequence[float]) -> npt.NDArray[np.float64]:
        self.sent[self.host] = numbers
        self.barrier.wait(10)
        gathered = np.asarray(self.sent, np.float64)
        self.barrier.wait(10)
        return gathered


def compared(*values: dict[str, Any]) -> tuple[str, ...]:
    """What hosts with these values find; all find the same."""
    sent: list[Sequence[float]] = [()] * len(values)
    barrier = Barrier(len(values))
    hosts = [InThreads(host, sent, barrier) for host in range(len(values))]
    with ThreadPoolExecutor(len(values)) as pool:
        (found,) = set(pool.map(differences_between_hosts, hosts, values))
    return found


LONG = "x" * 5000
DIFFERENCES: list[tuple[list[dict[str, Any]], tuple[str, ...]]] = [
    ([{"a": 1, "b": {"c": [1, 2]}}] * 3, ()),
    ([{"a": 1, "b": 2}, {"b": 2, "a": 1}], ()),
    ([{"a": 1}, {"a": 1}, {"a": 2}], ("a: 1 on host 0, 1; 2 on host 2",)),
    ([{"a": 2}, {"a": 1}, {"a": 1}], ("a: 2 on host 0; 1 on host 1, 2",)),
    ([{"a": 1}, {"a": 2}, {"a": 3}], ("a: 1 on host 0; 2 on host 1; 3 on host 2",)),
    ([{"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "d": "é€"}}],
     ("a.c: 2 on host 0; absent on host 1", "a.d: absent on host 0; é€ on host 1")),
    ([{"a": [{"rate": 0.1}]}, {"a": [{"rate": 0.25}]}], ("a[0].rate: 0.1 on host 0; 0.25 on host 1",)),
    ([{"a": None, "nan": float("nan")}, {"a": 0, "nan": float("nan")}], ("a: None on host 0; 0 on host 1",)),
    ([{"a": LONG + "1"}] * 2, ()),
]  # fmt: skip


@pytest.mark.parametrize(("values", "words"), DIFFERENCES)
def test_all_hosts_find_the_same_differences(values: list[dict[str, Any]], words: tuple[str, ...]) -> None:
    assert compared(*values) == words


def test_long_values_that_differ_at_their_end_are_found() -> None:
    (line,) = compared({"a": LONG + "1"}, {"a": LONG + "2"})
    assert len(line) < 300
    with pytest.raises(InvalidInput, match="the hosts of this run differ") as refused:
        refuse_difference([line])
    assert refused.value.exit_code == 2
    refuse_difference([])
