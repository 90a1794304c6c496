"""A stand-in for a slice of several TPU hosts: TensorFlow servers with CPUs, and a strategy over all of them.

Everything else is real: the processes, the resolver, the connection, and what one client makes of several hosts. As a
script, it trains as `run_without_prefect.py` does, on `accelerator: {kind: tpu, tpu: grpc://…}`; or, with `--local`, on
local replicas that add up as those of the stand-in do.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import cross_device_ops, cross_device_utils, device_util, mirrored_strategy
from tensorflow.python.distribute.collective_util import CommunicationImplementation, Options
from tensorflow.python.distribute.distribute_lib import StrategyExtendedV1

from tests.support import forked
from tests.support.moments import hold_where_asked
from tests.support.worker_processes import free_addresses

DRIVER = Path(__file__)
LOCAL = "--local"


class _Extended(mirrored_strategy.MirroredExtended):  # type: ignore[misc]
    """MirroredStrategy's own one refuses several remote hosts in eager mode."""

    def __init__(self, container: Any, devices: Sequence[str]) -> None:
        StrategyExtendedV1.__init__(self, container)
        self._use_var_policy = False
        self._communication_options = Options(implementation=CommunicationImplementation.RING)
        self._collective_keys = cross_device_utils.CollectiveKeys(group_key_start=1)
        self._cross_device_ops = self._collective_ops = cross_device_ops.ReductionToOneDevice()
        self._initialize_multi_worker([device_util.canonicalize(device) for device in devices])
        self._default_device = None  # as TPUStrategy: its scope places nothing
        self.experimental_enable_get_next_as_optional = True


class StandInSlice(tf.distribute.Strategy):  # type: ignore[misc]
    """Replaces `TPUStrategy`: a replica on each CPU of each server."""

    def __init__(self, _resolver: Any) -> None:
        found = [each.name for each in tf.config.list_logical_devices("CPU") if "/job:worker/" in each.name]
        super().__init__(_Extended(self, found))


def install(set_attribute: Any = setattr) -> None:
    """Let a machine without a TPU train on a slice of servers."""
    from baton.tasks.foundation.machine import tpu

    set_attribute(tpu, "require_packages", lambda: None)
    set_attribute(tf.tpu.experimental, "initialize_tpu_system", lambda _resolver: None)
    set_attribute(tf.distribute, "TPUStrategy", StandInSlice)


def serve(port: int, cpus: int) -> None:
    """`baton slice-server`, with CPUs in place of TPUs, until the process is killed."""
    from baton.flows.commands.main import main
    from baton.tasks.foundation.machine import tpu

    config = tf.compat.v1.ConfigProto(device_count={"CPU": cpus}, intra_op_parallelism_threads=1)
    tpu.require_local_tpu = lambda: None
    tf.distribute.Server = partial(tf.distribute.Server, config=config)
    sys.exit(main(["slice-server", "--port", str(port)]))


class Servers:
    """TensorFlow servers on this machine, a process each."""

    def __init__(self, hosts: int, *, cpus: int = 2, env: Mapping[str, str] | None = None) -> None:
        """Choose their addresses; `env` are more environment variables of each."""
        self.addresses = free_addresses(hosts)
        self._cpus = cpus
        self._env = dict(env or {})
        self._processes: dict[int, Any] = {}

    @property
    def tpu(self) -> str:
        """`accelerator.tpu` of the run file."""
        return ",".join(f"grpc://{address}" for address in self.addresses)

    def start(self, *tasks: int) -> None:
        for task in tasks:
            arguments = json.dumps({"port": int(self.addresses[task].rpartition(":")[2]), "cpus": self._cpus})
            command = [sys.executable, "-m", "tests.support.call_function", __name__, "serve", arguments]
            self._processes[task] = forked.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | self._env)
        for task in tasks:
            assert "this host's TPU is served at port" in self._processes[task].stdout.readline()

    def kill(self, *tasks: int) -> None:
        """Kill them with SIGKILL."""
        for task in tasks:
            process = self._processes.pop(task)
            process.kill()
            process.wait()
            process.stdout.close()

    def send(self, task: int, number: int) -> None:
        """Send a signal to one."""
        self._processes[task].send_signal(number)

    def end(self, task: int) -> int:
        """End one with SIGTERM; returns its exit code, with any of which but 0 Kubernetes starts it again."""
        process = self._processes.pop(task)
        process.terminate()
        with process.stdout:
            return int(process.wait())

    def kill_all(self) -> None:
        self.kill(*self._processes)


@contextmanager
def servers(hosts: int, *, cpus: int = 2, env: Mapping[str, str] | None = None) -> Iterator[Servers]:
    """Servers that are ready, and killed at the end of the block."""
    found = Servers(hosts, cpus=cpus, env=env)
    try:
        found.start(*range(hosts))
        yield found
    finally:
        found.kill_all()


def _reduce_to_one_device() -> None:
    """Let local replicas add up as those of the stand-in, in their order."""
    mirrored = tf.distribute.MirroredStrategy
    tf.distribute.MirroredStrategy = lambda devices: mirrored(devices, tf.distribute.ReductionToOneDevice())


if __name__ == "__main__":
    from tests.support import run_without_prefect

    run_without_prefect.leave_out_report()
    if LOCAL in sys.argv:
        sys.argv.remove(LOCAL)
        _reduce_to_one_device()
    else:
        install()
    hold_where_asked()
    sys.exit(run_without_prefect.exits_with(run_without_prefect.main(sys.argv[1:])))
