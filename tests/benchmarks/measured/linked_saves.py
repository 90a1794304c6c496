"""The save alone, of hosts that are threads of this process: `linked_saves.py HOSTS MEGABYTES_PER_SECOND MEGABYTES`.

Each host has a train state of its own, a real link to the others, and a store of its own bandwidth in front of one
folder. Nothing is trained, so that many hosts can be measured on few cores. The values are the seconds from the
snapshot to the manifest, and the MB that the snapshot of the host with the largest share takes.
"""

import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from baton.flows.train import train  # noqa: F401  # isort: skip - it quiets TensorFlow

from baton.tasks.foundation.checkpoint.snapshot import take_snapshot
from baton.tasks.foundation.checkpoint.write import write_snapshot
from tests.support.lab import lab_of, spec_of
from tests.support.linked_hosts import in_threads, linked_states
from tests.support.train_states import home_with_entry_7

_MODEL = """
def build():
    x = y = keras.Input((6,))
    for _ in range({blocks}):
        y = keras.layers.Dense(512)(y)
    model = keras.Model(x, keras.layers.Dense(3)(y))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""
# A kernel of 512 x 512 and its two slots.
_BLOCK_MEGABYTES = 3.15
_SAVES = 3


class CappedStore:
    """Forwards every call to another store, with a cap on the bytes a second that all threads together write to it."""

    def __init__(self, inner: Any, bytes_per_second: float) -> None:
        self.inner = inner
        self.transfers = 4
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def write_buffers(self, path: str, buffers: Sequence[memoryview]) -> Any:
        """Write when the bytes have gone through."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + sum(each.nbytes for each in buffers) / self._rate
            until = self._free_at
        stored = self.inner.write_buffers(path, buffers)
        time.sleep(max(until - time.monotonic(), 0.0))
        return stored

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def main(hosts: int, megabytes_per_second: float, megabytes: float) -> None:
    """Save a few times, and print what it took."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        home = home_with_entry_7(folder / "home")
        lab = lab_of(folder, _MODEL.format(blocks=max(1, round(megabytes / _BLOCK_MEGABYTES))))
        with linked_states(lab, spec_of("build"), hosts) as states:
            stores = [CappedStore(home, megabytes_per_second * 1e6) for _ in states]

            def save(host: int, attempt: str) -> int:
                snapshot = take_snapshot(states[host])
                if snapshot is not None:
                    write_snapshot(snapshot, stores[host], base=7, attempt=attempt)
                return int(states[host].page_buffer.size)

            for number in range(_SAVES):
                for state in states:  # a file that stayed the same is not written again
                    for leaf in state.leaves:
                        if leaf.components[0].dtype.is_floating:
                            leaf.components[0].assign_add(0.5 + 0 * leaf.components[0])
                began = time.monotonic()
                outcomes = in_threads([partial(save, host, f"{number:032x}") for host in range(hosts)])
                seconds = time.monotonic() - began
                for outcome in outcomes:
                    if isinstance(outcome, Exception):
                        raise outcome
                if number:  # the first save also gets the memory ready
                    sys.stdout.write(f"value seconds = {seconds}\n")
            sys.stdout.write(f"value snapshot = {max(outcomes) / 1e6}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
