"""Several processes that train one run together on this machine."""

import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.shipped_runs import Finished
from tests.support.training_child import Child

THREADS = ["accelerator.intra_op_threads=1", "accelerator.inter_op_threads=1"]


def free_addresses(count: int) -> list[str]:
    """`count` different addresses on 127.0.0.1 with free ports."""
    with ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


class Workers:
    """One process for each host, configured by TF_CONFIG; the first is the chief."""

    def __init__(
        self,
        hosts: int,
        storage: Path,
        *options: str,
        name: str = "digits",
        extra: Sequence[str] = (),
        notes: Path,
        file: Path | None = None,
        last: Mapping[str, Any] | None = None,
        env: Mapping[int, Mapping[str, str]] | None = None,
    ) -> None:
        """Start them.

        Args:
            hosts: how many.
            storage: the storage root.
            options: options of the driver.
            name: `digits` or `text`.
            extra: more settings, as key=value.
            notes: an existing folder for their output.
            file: another run file than the shipped one.
            last: what is different on the last host: more `extra`, another `file`, an `env`.
            env: more environment variables, by host.
        """
        last = {"extra": [], "file": file, "env": {}, **(last or {})}
        addresses = free_addresses(hosts)
        settings = ["accelerator.kind=multi_worker", *THREADS, *extra]
        alike = {"extra": [], "file": file, "env": {}}
        self.children = [
            Child(
                name,
                storage,
                *options,
                extra=[*settings, *own["extra"]],
                notes=notes,
                env={**place(addresses, index), **own["env"], **(env or {}).get(index, {})},
                file=own["file"],
            )
            for index, own in enumerate([*[alike] * (hosts - 1), last])
        ]
        self.home = self.children[0].home

    def finish(self, code: int | None = 0) -> list[Finished]:
        """Wait for all; each must exit with `code` unless it is None."""
        try:
            return [child.finish(code) for child in self.children]
        finally:
            self.end()

    def end(self) -> None:
        """Kill the processes that still run."""
        for child in self.children:
            if child.alive:
                child.kill()


def place(addresses: list[str], index: int) -> dict[str, str]:
    """The environment of a host."""
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
    return {"TF_CONFIG": json.dumps(config)}
