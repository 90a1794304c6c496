"""The link between the hosts of a run: one connection from each host to the chief, beside TensorFlow's collectives.

A collective needs every host at the same step, in the training thread. What hosts agree on before TensorFlow is
imported, and what they tell each other while a save is in flight, goes over this link. A message is a *frame*: a topic
and bytes. A frame of a topic that nobody waits for is kept until somebody asks for it, so threads need no order between
them.

A host that dies closes its connection, even by SIGKILL. Then every thread that waits for a frame, of any host, raises
`AcceleratorLost` at once: a group that has lost a host cannot go on. So does a frozen host, from which not even a
heartbeat comes, after half a minute, and one that lives but does not send what it should, after the seconds that the
caller gives.
"""

import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from baton.tasks.foundation.errors import AcceleratorLost

MOST_FRAME_BYTES: Final = 64 << 20
_MOST_TOPIC_BYTES: Final = 200
# More frames of one topic than anybody would leave unread.
_MOST_KEPT: Final = 10_000
# Bytes of the data, bytes of the topic.
_HEADER: Final = struct.Struct("!IH")
# A host that takes nothing for so long is frozen, or its network is gone.
_SEND_SECONDS: Final = 60
# A machine that lost its power closes no connection: it is asked for a sign of life, and given up after 10 + 3 * 5 s.
_KEEPALIVE: Final = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
# Each host says so often that it lives, and is given up after so long without a word.
_BEAT_SECONDS: Final = 3.0
_SILENT_SECONDS: Final = 30.0
_BEAT: Final = ""  # its topic
_REMEDY: Final = "Committed checkpoints are kept; run the same command again on all hosts to continue"


class HostLink:
    """Connections of one process to other hosts: of the chief to each of them, of any other host to the chief.

    All methods may be called by any thread.

    Attributes:
        host: index of this process's host; 0 is the chief.
        agreed: digest of what its hosts have agreed on; empty before.
    """

    def __init__(self, host: int, sockets: Mapping[int, socket.socket]) -> None:
        """Take over connected sockets, and begin to read from them, in one thread each, and to send heartbeats.

        Args:
            host: index of this process's host.
            sockets: by the index of the host at the other end. The link closes them.
        """
        self.host, self.agreed = host, ""
        self._sockets = dict(sorted(sockets.items()))
        self._sending = {other: threading.Lock() for other in self._sockets}
        # Only single calls into C change what threads share, so no signal can leave a lock behind.
        self._frames: dict[tuple[int, str], queue.SimpleQueue[bytes | None]] = {}
        self._lost: list[str] = []
        self._heard = dict.fromkeys(self._sockets, time.monotonic())
        for other, connection in self._sockets.items():
            _prepare(connection)
            reader = threading.Thread(
                target=self._read, args=(other, connection), name=f"baton-host-{other}", daemon=True
            )
            reader.start()
        threading.Thread(target=self._beat, name="baton-host-beat", daemon=True).start()
        # A child that outlives this process must not keep its connections open.
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def send(self, topic: str, data: bytes) -> None:
        """Send a frame to the chief; the chief sends it to every other host.

        Args:
            topic: at most 200 bytes.
            data: at most 64 MB.

        Raises:
            ValueError: the topic or the data is too large.
            AcceleratorLost: a host is gone, or takes nothing for a minute.
        """
        name = topic.encode()
        if len(name) > _MOST_TOPIC_BYTES or len(data) > MOST_FRAME_BYTES:
            raise ValueError(
                f"a frame of topic {topic[:50]} has {len(data)} bytes; at most {MOST_FRAME_BYTES} are sent"
            )
        for other in self._sockets:
            self._send(other, name, data)

    def receive(self, topic: str, host: int, *, seconds: float) -> bytes:
        """Wait for the next frame of a topic.

        Args:
            topic: of the frame.
            host: that sends it.
            seconds: the longest wait.

        Raises:
            AcceleratorLost: a host is gone or frozen, or nothing of this topic came in time.
        """
        frames = self._of(host, topic)
        until = time.monotonic() + seconds
        while True:
            if self._lost:  # frames that came before are still delivered
                frames.put(None)
            now = time.monotonic()
            try:
                data = frames.get(timeout=min(max(until - now, 0.0), _BEAT_SECONDS))
                break
            except queue.Empty:
                silent = now - self.last_heard(host)
                if silent > _SILENT_SECONDS:
                    raise AcceleratorLost(f"host {host} has been silent for {silent:.0f} s. {_REMEDY}") from None
                if now >= until:
                    raise AcceleratorLost(f"host {host} sent no {topic} for {seconds:.0f} s. {_REMEDY}") from None
        if data is None:
            frames.put(None)  # for other threads that wait for it
            raise self._error()
        return data

    def gather(self, topic: str, data: bytes, *, seconds: float) -> list[bytes] | None:
        """Send a frame to the chief, which waits for those of all hosts.

        Args:
            topic: of the frames.
            data: this host's.
            seconds: the longest wait for a host.

        Returns:
            The data of every host by index, on the chief; None on other hosts.

        Raises:
            AcceleratorLost: a host is gone, or sent nothing in time.
        """
        if self.host != 0:
            self.send(topic, data)
            return None
        return [data, *(self.receive(topic, other, seconds=seconds) for other in self._sockets)]

    def last_heard(self, host: int) -> float:
        """When anything last came from a host, in seconds of `time.monotonic`."""
        return self._heard[host]

    def close(self) -> None:
        """Close the connections; threads that wait for a frame raise `AcceleratorLost`."""
        self._lose("this process has closed its connections")
        for connection in self._sockets.values():
            with suppress(OSError):  # the other end may have closed it
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
            connection.close()

    def _leave_to_parent(self) -> None:
        for connection in self._sockets.values():
            connection.close()

    def _send(self, other: int, topic: bytes, data: bytes) -> None:
        connection = self._sockets[other]
        try:
            with self._sending[other]:
                connection.sendall(_HEADER.pack(len(data), len(topic)) + topic)
                connection.sendall(data)
        except OSError as fault:
            silent = isinstance(fault, BlockingIOError)
            why = f"took nothing for {_SEND_SECONDS} s" if silent else "closed its connection"
            self._lose(f"host {other} {why}")
            raise self._error() from fault
        except BaseException:  # a signal came in the middle of a frame: what follows could not be read
            self.close()
            raise

    def _beat(self) -> None:
        with suppress(AcceleratorLost):  # who waits for a frame raises it
            while not self._lost:
                for other in self._sockets:
                    self._send(other, _BEAT.encode(), b"")
                time.sleep(_BEAT_SECONDS)

    def _of(self, host: int, topic: str) -> "queue.SimpleQueue[bytes | None]":
        return self._frames.setdefault((host, topic), queue.SimpleQueue())

    def _lose(self, why: str) -> None:
        """Wake every thread that waits. A thread that begins to wait meanwhile sees the reason."""
        self._lost.append(why)
        for frames in list(self._frames.values()):
            frames.put(None)

    def _error(self) -> AcceleratorLost:
        return AcceleratorLost(f"{self._lost[0]}: the hosts of this run have lost each other. {_REMEDY}")

    def _read(self, host: int, connection: socket.socket) -> None:
        why = "closed its connection"
        try:
            while True:
                size, name_size = _HEADER.unpack(bytes_from(connection, _HEADER.size))
                if size > MOST_FRAME_BYTES or name_size > _MOST_TOPIC_BYTES:
                    why = f"sent a frame of {size} bytes with a topic of {name_size}, which Baton never sends"
                    break
                name, data = bytes_from(connection, name_size), bytes_from(connection, size)
                self._heard[host] = time.monotonic()
                if name == _BEAT.encode():
                    continue
                frames = self._of(host, name.decode())
                if frames.qsize() >= _MOST_KEPT:
                    why = f"sent {_MOST_KEPT} frames of one topic that nobody read"
                    break
                frames.put(data)
        except EOFError:
            pass
        except (OSError, UnicodeDecodeError) as fault:
            why = f"closed its connection ({fault})"
        self._lose(f"host {host} {why}")


def _prepare(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _SEND_SECONDS, 0))
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # macOS has other names
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def bytes_from(connection: socket.socket, size: int, *, until: float | None = None) -> bytes:
    """Read exactly `size` bytes.

    Args:
        connection: to read from.
        until: when to give up, in seconds of `time.monotonic`; None: never.

    Raises:
        EOFError: the other end has closed the connection.
        OSError: the connection is lost, or `until` came first.
    """
    data = bytearray()
    while len(data) < size:
        if until is not None:
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError("no answer")
            connection.settimeout(left)
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError("it closed the connection")
        data += part
    return bytes(data)
