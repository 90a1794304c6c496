"""A FAKE of Google Cloud Storage's JSON API on loopback, for tests: in memory, with fault injection.

In a test's own process:           with FakeGcs(buckets=("bucket",)) as server: ... server.url ...
As a separate process:             with fake_gcs_process(buckets=("bucket",)) as server: ... server.url ...
By hand:                           python -m tests.fakes.gcs.server bucket

It follows https://cloud.google.com/storage/docs/json_api. Comments mark behaviour that is not documented there.
`Exchange` is one request and its response, with the fault that the plan has for it; `Control` handles the endpoints
below /_fake/, which the real service has not.
"""

import contextlib
import json
import secrets
import socket
import socketserver
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np

from tests.fakes.gcs.faults import Fault, FaultPlan, FaultRun
from tests.fakes.gcs.service import Service
from tests.fakes.gcs.store import Refusal, Store, as_content
from tests.fakes.gcs.transfers import flipped
from tests.fakes.gcs.wire import Body, Call, Hangup, Pace, Request, Response, Wire, route

NAME_BYTES = 8192
ONLY_OF_SUCCESS = ("truncate", "truncate-quietly", "corrupt-download", "bare")
STATUS_MESSAGES = {
    429: ("The rate limit for this resource was exceeded.", "rateLimitExceeded"),
    500: ("We encountered an internal error. Please try again.", "internalError"),
    503: ("We encountered an internal error. Please try again.", "backendError"),
}


@dataclass
class Sent:
    """One request as it was sent, for tests that count requests.

    began, ended: positions in the order of all beginnings and ends; `ended` is None while it has no response.
    """

    method: str
    kind: str
    path: str
    began: int
    ended: int | None = None


@dataclass
class Tally:
    """Counters of requests and responses.

    sent: all requests, in the order in which they began.
    counts: requests by (method, kind), including those with a fault.
    statuses, media: responses by status, and downloads by (bucket, name), even if they were cut off.
    bytes_in, bytes_out: of bodies.
    """

    sent: list[Sent] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    media: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes_in: int = 0
    bytes_out: int = 0
    lock: Lock = field(default_factory=Lock, repr=False)

    _moment: int = 0

    def request(self, method: str, call: Call) -> Sent:
        with self.lock:
            self.counts[method, call.kind] += 1
            self._moment += 1
            self.sent.append(Sent(method, call.kind, call.path, self._moment))
            return self.sent[-1]

    def received(self, bytes_in: int) -> None:
        with self.lock:
            self.bytes_in += bytes_in

    def responding(self, call: Call, status: int, bytes_out: int, sent: Sent) -> None:
        """Call this before sending the response, because its reader may check the counters next."""
        with self.lock:
            self._moment += 1
            sent.ended = self._moment
            self.statuses[status] += 1
            self.bytes_out += bytes_out
            if call.kind == "object.media" and status in {200, 206}:
                self.media[call.bucket, call.name] += 1


@dataclass
class Exchange:
    """Reads a request's body, applies it and responds, or fails at the step that its fault names."""

    wire: Wire
    request: Request
    service: Service
    tally: Tally
    faults: FaultRun
    authorize: Callable[[Request], None]

    def run(self) -> None:
        request, wire = self.request, self.wire
        call = route(request)
        sent = self.tally.request(request.method, call)
        body = Body(wire, dict(request.headers))
        sent.path = self._named(call, body).path
        fault = self.faults.next(request.method, call.kind, sent.path)
        kind = fault.kind if fault else ""
        wire.pace = Pace(fault.bytes_per_second) if fault and kind == "slow" else Pace()
        if fault and kind == "slow":
            time.sleep(fault.delay_seconds)
        self._receive(body, fault)
        if call.kind == "object.insert" and not call.name:
            head = request.body[:NAME_BYTES]
            sent.path = Call(call.kind, call.bucket, self.service.transfers.name_in_body(request, head)).path
        response = self._early_response(fault) or self._respond(call, fault)
        if kind == "response-lost":
            wire.reset()
        if fault and kind == "stall":
            time.sleep(fault.stall_seconds)
            if fault.stall_then == "reset":
                wire.reset()
        self._send(call, response, fault, sent)
        if request.headers.get("connection", "").lower() == "close":
            raise Hangup

    def _named(self, call: Call, body: Body) -> Call:
        """The call with the object's name, which may be in a multipart body or in an upload session."""
        transfers = self.service.transfers
        # Less than a socket buffer holds, so a client does not notice that its body is not read.
        if call.kind == "object.insert" and not call.name and not self.faults.is_idle:
            return Call(call.kind, call.bucket, transfers.name_in_body(self.request, body.fill(NAME_BYTES)))
        if call.kind.startswith("upload.") and not call.name:
            session = transfers.sessions.get(self.request.query.get("upload_id", ""))
            return call if session is None else Call(call.kind, session.bucket, session.name)
        return call

    def _receive(self, body: Body, fault: Fault | None) -> None:
        kind = fault.kind if fault else ""
        if fault and kind == "unread":
            time.sleep(fault.stall_seconds)
        if kind in {"reset-before-body", "unread"}:
            self.wire.reset()
        try:
            stop = int(body.length * fault.fraction) if fault and kind == "reset-in-body" else None
            self.request.body = body.fill(stop)
        except Hangup:
            self.tally.received(body.received.size)
            # The service may store the part of a chunk that arrived, so a client has to query it.
            self.service.transfers.keep_interrupted(self.request, body.received)
            self.wire.reset()
        self.tally.received(body.received.size)
        if kind == "reset-in-body":
            self.service.transfers.keep_interrupted(self.request, body.received)
            self.wire.reset()
        if kind == "reset-after-body":
            self.wire.reset()

    def _early_response(self, fault: Fault | None) -> Response | None:
        """The response to a request that never reaches the store; None if it does."""
        if fault and fault.kind == "status":
            message, reason = STATUS_MESSAGES.get(fault.code, ("Injected by the fake.", "backendError"))
            return Response.of_refusal(Refusal(fault.code, message, reason))
        if fault and fault.kind == "instead" and not fault.takes_effect:
            return _proxy_response(fault)
        if fault and fault.kind == "expired-token":
            return Response.of_refusal(Refusal(401, "Invalid Credentials"))
        try:
            self.authorize(self.request)
        except Refusal as refusal:
            return Response.of_refusal(refusal)
        return None

    def _respond(self, call: Call, fault: Fault | None) -> Response:
        request = self.request
        if fault and fault.kind == "corrupt-upload":
            request.spoil = lambda data: _flipped_array(data, fault.fraction)
        if fault and fault.kind == "short-chunk":
            request.keep_at_most = fault.fraction
        response = self.service.respond(call, request)
        if fault and fault.kind == "duplicate":
            response = self.service.respond(call, request)
        return response

    def _send(self, call: Call, response: Response, fault: Fault | None, sent: Sent) -> None:
        kind = fault.kind if fault else ""
        if kind in ONLY_OF_SUCCESS and response.status >= 300:
            kind = ""
        if kind == "reset-in-response" and not response.size:
            # After a complete response without a body, a client would not notice the reset.
            self.wire.reset()
        if fault and kind == "instead":
            response = _proxy_response(fault)
        if kind == "bare":
            response.headers = {key: value for key, value in response.headers.items() if not key.startswith("X-Goog-")}
        if kind == "bad-status-line":
            self.wire.send(b"HTP 2OO\r\n\r\n")
            raise Hangup
        stop = None
        if fault and kind in {"reset-in-response", "truncate", "truncate-quietly", "cut-response"}:
            stop = int(response.size * fault.fraction)
        if fault and kind == "corrupt-download":
            response.body = flipped(response.body, fault.fraction)
        self.tally.responding(call, response.status, response.size if stop is None else stop, sent)
        self.wire.respond(
            response, stop=stop, claimed_size=stop if kind in {"truncate-quietly", "cut-response"} else None
        )
        if kind == "reset-in-response":
            self.wire.reset()
        if kind == "truncate":
            raise Hangup


def _proxy_response(fault: Fault) -> Response:
    return Response(fault.code, dict(fault.headers), as_content(fault.body.encode()))


def _flipped_array(data: np.ndarray, fraction: float) -> np.ndarray:
    return flipped((data,), fraction)[0]


INVALID_GRANT = {
    "error": "invalid_grant",
    "error_description": "Invalid JWT: Token must be a short-lived token (60 minutes) and in a reasonable timeframe. "
    "Check your iat and exp values in the JWT claim.",
}


class Control:
    """Handles /_fake/. These requests get no faults, and only token requests are counted."""

    def __init__(self, fake: "FakeGcs", *, require_token: bool) -> None:
        self.fake = fake
        self.required = require_token
        self.refuse = False
        self._tokens: set[str] = set()

    def handle(self, wire: Wire, request: Request) -> bool:
        """Respond to a request to a control endpoint; returns False for any other request."""
        handlers = {"/_fake/state": self._state, "/_fake/faults": self._faults, "/_fake/token": self._token}
        handler = handlers.get(request.path)
        if handler is None:
            return False
        request.body = Body(wire, dict(request.headers)).fill()
        wire.respond(handler(request))
        return True

    def _state(self, _: Request) -> Response:
        fake = self.fake
        with fake.tally.lock, fake.store.lock:
            counts = {f"{method} {kind}": number for (method, kind), number in fake.tally.counts.items()}
            names = {name: list(home.names) for name, home in fake.store.buckets.items()}
        return Response.of_json({"counts": counts, "objects": names})

    def _faults(self, request: Request) -> Response:
        self.fake.faults = FaultPlan(**request.json())
        return Response.of_json({})

    def _token(self, request: Request) -> Response:
        self.fake.tally.request(request.method, Call("token"))
        if self.refuse:
            return Response.of_json(INVALID_GRANT, 400)
        token = f"fake-{secrets.token_hex(8)}"
        self._tokens.add(token)
        return Response.of_json({"access_token": token, "expires_in": 3600, "token_type": "Bearer"})

    def authorize(self, request: Request) -> None:
        """Refuse a request without a valid token from this fake."""
        if not self.required:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme != "Bearer" or token not in self._tokens:
            raise Refusal(401, "Invalid Credentials", "authError", {"WWW-Authenticate": 'Bearer realm="fake"'})


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
        rewrite_bytes_per_call: larger rewrites take several calls.
        require_token: refuse requests without a token from `POST /_fake/token`.
        clock: seconds since the epoch, for generations, timestamps and retention.
    """

    def __init__(
        self,
        buckets: Sequence[str] = ("bucket",),
        *,
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
        self._listener: _Listener | None = None
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> "FakeGcs":
        self._listener = _Listener(("127.0.0.1", 0), _Connection)
        self._listener.fake = self
        threading.Thread(
            target=self._listener.serve_forever, kwargs={"poll_interval": 0.02}, name="fake-gcs", daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
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
        """`counts` of requests by "METHOD kind", and names of `objects` by bucket."""
        return self._call("state")

    def set_faults(self, plan: FaultPlan) -> None:
        self._call("faults", plan.to_json())

    def _call(self, name: str, text: str = "") -> dict[str, Any]:
        request = urllib.request.Request(f"{self.url}/_fake/{name}", data=text.encode())  # noqa: S310  # loopback
        with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310  # loopback
            return dict(json.loads(response.read()))


@contextlib.contextmanager
def fake_gcs_process(buckets: Sequence[str] = ("bucket",)) -> Iterator[RemoteFakeGcs]:
    """A fake in a separate process, so that it shares no interpreter with the measured code."""
    command = [sys.executable, "-m", __spec__.name, *buckets]
    # The fake ends when its standard input closes, so it never outlives this process.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline() if process.stdout else ""
        if not line:
            raise RuntimeError(f"the fake did not start: it ended with {process.wait()}")
        yield RemoteFakeGcs(json.loads(line)["url"])


def main() -> None:
    """Serve the buckets that the command line names until standard input closes."""
    with FakeGcs(tuple(sys.argv[1:])) as server:
        sys.stdout.write(json.dumps({"url": server.url}) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
