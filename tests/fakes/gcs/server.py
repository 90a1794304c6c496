"""A FAKE of Google Cloud Storage's JSON API on loopback, for tests: in memory, with fault injection.

In a test's own process:           with FakeGcs(buckets=("bucket",)) as server: ... server.url ...
As a separate process:             with fake_gcs_process(buckets=("bucket",)) as server: ... server.url ...
By hand:                           python -m tests.fakes.gcs.server --port 0 --bucket bucket

It follows https://cloud.google.com/storage/docs/json_api. Comments mark behaviour that is not documented there.
"""

import argparse
import contextlib
import json
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

from tests.fakes.gcs.control import Control
from tests.fakes.gcs.exchange import Exchange, Tally
from tests.fakes.gcs.faults import FaultPlan, FaultRun
from tests.fakes.gcs.service import Service
from tests.fakes.gcs.store import Store
from tests.fakes.gcs.wire import Hangup, Wire

__all__ = ["FakeGcs", "FaultPlan", "RemoteFakeGcs", "fake_gcs_process"]


class _Listener(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    fake: "FakeGcs"

    def handle_error(self, request: Any, client_address: Any) -> None:
        self.fake.errors.append(sys.exc_info()[1])
        super().handle_error(request, client_address)


class _Connection(socketserver.BaseRequestHandler):
    server: _Listener

    def handle(self) -> None:
        fake = self.server.fake
        wire = Wire(self.request)
        with fake.connected(self.request), contextlib.suppress(Hangup):
            while (request := wire.read_head()) is not None:
                if not fake.control.handle(wire, request):
                    Exchange(wire, request, fake.service, fake.tally, fake.fault_run, fake.control.authorize).run()


class FakeGcs:
    """The fake as a thread of this process.

    Args:
        buckets: created at the start.
        port: 0 chooses a free one.
        rewrite_bytes_per_call: larger rewrites take several calls.
        require_token: refuse requests without a token from `POST /_fake/token`.
        clock: seconds since the epoch, for generations, timestamps and retention.
    """

    def __init__(
        self,
        buckets: Sequence[str] = ("bucket",),
        *,
        port: int = 0,
        rewrite_bytes_per_call: int | None = None,
        require_token: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.store = Store(tuple(buckets), clock=clock)
        self.service = Service(self.store, rewrite_bytes_per_call=rewrite_bytes_per_call)
        self.tally = Tally()
        self.fault_run = FaultRun(None)
        self.control = Control(self, require_token=require_token)
        self.errors: list[BaseException | None] = []
        self._port = port
        self._listener: _Listener | None = None
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> "FakeGcs":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        self._listener = _Listener(("127.0.0.1", self._port), _Connection)
        self._listener.fake = self
        threading.Thread(
            target=self._listener.serve_forever, kwargs={"poll_interval": 0.02}, name="fake-gcs", daemon=True
        ).start()

    def stop(self) -> None:
        if self._listener is None:
            return
        self._listener.shutdown()
        self._listener.server_close()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self._listener = None

    @contextlib.contextmanager
    def connected(self, connection: socket.socket) -> Iterator[None]:
        with self._lock:
            self._connections.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._connections.discard(connection)

    @property
    def url(self) -> str:
        if self._listener is None:
            raise RuntimeError("the fake is not running; use it as a context manager")
        return f"http://127.0.0.1:{self._listener.server_address[1]}"

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        """Requests by (method, kind), such as ("POST", "object.insert")."""
        return self.tally.counts

    def count(self, kind: str) -> int:
        """Number of requests whose kind starts with `kind`, such as "object.insert" or "upload."."""
        with self.tally.lock:
            return sum(number for (_, one), number in self.tally.counts.items() if one.startswith(kind))

    @property
    def faults(self) -> FaultPlan | None:
        return self.fault_run.plan

    @faults.setter
    def faults(self, plan: FaultPlan | None) -> None:
        self.fault_run = FaultRun(plan)

    def reset_counters(self) -> None:
        self.tally = Tally()


class RemoteFakeGcs:
    """A fake in another process, controlled over its control endpoints."""

    def __init__(self, url: str) -> None:
        self.url = url

    def state(self) -> dict[str, Any]:
        """Counters, faults so far, objects and settings."""
        return self._call("GET", "state")

    def set_faults(self, plan: FaultPlan | None) -> None:
        self._call("POST", "faults", json.loads(plan.to_json()) if plan else {})

    def reset_counters(self) -> None:
        self._call("POST", "reset-counters")

    def count(self, kind: str) -> int:
        counts: dict[str, int] = self.state()["counts"]
        return sum(number for key, number in counts.items() if key.split(" ")[1].startswith(kind))

    def _call(self, method: str, name: str, value: Any = None) -> dict[str, Any]:
        body = None if value is None else json.dumps(value).encode()
        request = urllib.request.Request(f"{self.url}/_fake/{name}", data=body, method=method)  # noqa: S310  # loopback
        with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310  # loopback
            return dict(json.loads(response.read()))


@contextlib.contextmanager
def fake_gcs_process(buckets: Sequence[str] = ("bucket",), *arguments: str) -> Iterator[RemoteFakeGcs]:
    """A fake in a separate process, so that it shares no interpreter with the measured code.

    Args:
        buckets: created at the start.
        arguments: further command-line options, such as "--require-token".
    """
    command = [sys.executable, "-m", __spec__.name, "--port", "0", "--until-stdin-closes", *arguments]
    for bucket in buckets:
        command += ["--bucket", bucket]
    # The fake ends when its standard input closes, so it never outlives this process.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
        if not line:
            raise RuntimeError(f"the fake did not start: it ended with {process.wait()}")
        yield RemoteFakeGcs(json.loads(line)["url"])
    finally:
        process.terminate()
        process.wait(timeout=30)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description="A fake of Google Cloud Storage on loopback.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--bucket", action="append", default=[])
    parser.add_argument("--require-token", action="store_true")
    parser.add_argument("--rewrite-bytes-per-call", type=int)
    parser.add_argument("--until-stdin-closes", action="store_true")
    options = parser.parse_args(arguments)
    ended = threading.Event()

    def end(_: int, __: FrameType | None) -> None:
        ended.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    with FakeGcs(
        tuple(options.bucket),
        port=options.port,
        rewrite_bytes_per_call=options.rewrite_bytes_per_call,
        require_token=options.require_token,
    ) as server:
        sys.stdout.write(json.dumps({"url": server.url}) + "\n")
        sys.stdout.flush()
        if options.until_stdin_closes:
            threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
        ended.wait()


if __name__ == "__main__":
    main()
