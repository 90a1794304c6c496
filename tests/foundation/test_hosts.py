"""The only host of a run."""

import numpy as np

from tasks.foundation.hosts import Hosts, OneHost


def test_one_host_is_the_chief_and_exchanges_with_itself() -> None:
    hosts: Hosts = OneHost()
    assert (hosts.is_chief, hosts.hosts, hosts.broadcast_from_chief(7)) == (True, 1, 7)
    numbers = hosts.gather_from_hosts([1, 2.5])
    assert (numbers.dtype, numbers.tolist()) == (np.float64, [[1.0, 2.5]])
