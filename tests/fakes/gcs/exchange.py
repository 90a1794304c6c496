"""One request and its response, with the fault that the plan has for it."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from tests.fakes.gcs.api import Call, Request, Response, route
from tests.fakes.gcs.faults import Fault, FaultRun
from tests.fakes.gcs.objects import Refusal, as_content
from tests.fakes.gcs.service import Service
from tests.fakes.gcs.transfers import flipped
from tests.fakes.gcs.wire import Body, Hangup, Pace, Wire

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
            session = transfers.sessions.peek(self.request.query.get("upload_id", ""))
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
