"""HTTP/1.1 on sockets: simple parsing of heads, and bodies read into and sent from arrays."""

import contextlib
import http.client
import socket
import struct
import time
from urllib.parse import urlsplit

import numpy as np

from tests.fakes.gcs.api import EMPTY, Request, Response
from tests.fakes.gcs.objects import Content, cut

HEAD_BYTES = 1 << 16
PIECE_BYTES = 1 << 22
JOIN_BELOW = 1 << 16


class Hangup(Exception):
    """The connection was closed by either side."""


class Pace:
    """Limits a transfer to a number of bytes per second; None means no limit."""

    def __init__(self, bytes_per_second: float | None = None) -> None:
        self.bytes_per_second = bytes_per_second
        self.piece_bytes = PIECE_BYTES if bytes_per_second is None else max(int(bytes_per_second / 50), 1)

    def spend(self, count: int) -> None:
        if self.bytes_per_second is not None:
            time.sleep(count / self.bytes_per_second)


class Wire:
    """One connection of a client."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.pace = Pace()
        self._early = bytearray()
        # Responses are many and small. Waiting to fill a packet would cost 40 ms each.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def read_head(self) -> Request | None:
        """The next request without its body; None when the client has closed the connection."""
        while (end := self._early.find(b"\r\n\r\n")) < 0:
            if len(self._early) > HEAD_BYTES or not self._receive_more():
                return None
        lines = bytes(self._early[:end]).decode("latin-1").split("\r\n")
        del self._early[: end + 4]
        method, target, _ = lines[0].split(" ", 2)
        pairs = (line.partition(":") for line in lines[1:])
        headers = {key.strip().lower(): value.strip() for key, _, value in pairs}
        if target.startswith("http"):
            parts = urlsplit(target)
            target = parts.path + (f"?{parts.query}" if parts.query else "")
        return Request(method, target, headers)

    def _receive_more(self) -> bool:
        try:
            received = self.socket.recv(HEAD_BYTES)
        except OSError:
            return False
        self._early += received
        return bool(received)

    def read_into(self, target: memoryview) -> int:
        """Read into `target` until it is full or the client stops sending; returns the number of bytes."""
        start = min(len(self._early), len(target))
        target[:start] = self._early[:start]
        del self._early[:start]
        while start < len(target):
            piece = target[start : start + self.pace.piece_bytes]
            try:
                # One call per piece, because each return waits for the GIL.
                received = self.socket.recv_into(piece, len(piece), socket.MSG_WAITALL)
            except OSError:
                return start
            if not received:
                return start
            start += received
            self.pace.spend(received)
        return start

    def send(self, data: bytes | memoryview) -> None:
        try:
            if self.pace.bytes_per_second is None:
                self.socket.sendall(data)
                return
            view = memoryview(data)
            for start in range(0, len(view), self.pace.piece_bytes):
                piece = view[start : start + self.pace.piece_bytes]
                self.pace.spend(len(piece))
                self.socket.sendall(piece)
        except OSError:
            raise Hangup from None

    def respond(self, response: Response, *, stop: int | None = None, claimed_size: int | None = None) -> None:
        """Send a response.

        stop: send only this many bytes of the body.
        claimed_size: a wrong value for Content-Length.
        """
        body = response.body if stop is None else cut(response.body, 0, stop)
        reason = http.client.responses.get(response.status, "Client Closed Request")
        lines = [f"HTTP/1.1 {response.status} {reason}", "Server: fake-gcs"]
        lines += [f"{key}: {value}" for key, value in response.headers.items()]
        if response.status not in {204, 304}:
            lines.append(f"Content-Length: {response.size if claimed_size is None else claimed_size}")
        self._send_parts(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"), body)

    def _send_parts(self, head: bytes, body: Content) -> None:
        if sum(piece.size for piece in body) < JOIN_BELOW:
            self.send(head + b"".join(piece.tobytes() for piece in body))
            return
        self.send(head)
        for piece in body:
            self.send(memoryview(piece))

    def reset(self) -> None:
        """End the connection as a crash does: RST instead of FIN, and bytes in transit are lost."""
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()
        raise Hangup


class Body:
    """A request's body, received on demand."""

    def __init__(self, wire: Wire, headers: dict[str, str]) -> None:
        self._wire = wire
        self._length = int(headers.get("content-length") or 0)
        self._data = np.empty(self._length, dtype=np.uint8) if self._length else EMPTY
        self._received = 0

    @property
    def length(self) -> int:
        return self._length

    @property
    def received(self) -> np.ndarray:
        return self._data[: self._received]

    def fill(self, stop: int | None = None) -> np.ndarray:
        """Receive up to `stop` bytes, or all.

        Raises:
            Hangup: the client closed the connection early; `received` has the bytes that arrived.
        """
        stop = self._length if stop is None else min(stop, self._length)
        if self._received < stop:
            self._received += self._wire.read_into(memoryview(self._data)[self._received : stop])
            if self._received < stop:
                raise Hangup
        return self._data[:stop]
