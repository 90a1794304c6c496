"""Ports in front of a server on loopback, each with a bandwidth of its own, as hosts in front of a bucket have."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

_PIECE_BYTES = 64 << 10


@contextmanager
def capped_ports(url: str, count: int, *, bytes_per_second: float) -> Iterator[list[str]]:
    """Listen on `count` ports, and pass what arrives on to a server.

    Args:
        url: the server's, http://127.0.0.1:PORT.
        count: how many.
        bytes_per_second: that one port passes, over all of its connections, to the server. It passes as many back.

    Yields:
        The address of each port.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="capped-ports", daemon=True)
    thread.start()
    port = urlsplit(url).port

    async def listen() -> asyncio.Server:
        up, down = _Cap(bytes_per_second), _Cap(bytes_per_second)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            answers, server = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_pass_on(reader, server, up), _pass_on(answers, writer, down))

        return await asyncio.start_server(connected, "127.0.0.1", 0, limit=_PIECE_BYTES)

    try:
        servers = [asyncio.run_coroutine_threadsafe(listen(), loop).result(60) for _ in range(count)]
        yield [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in servers]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)


class _Cap:
    """Bytes a second of several connections together."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0

    async def spend(self, count: int) -> None:
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now) + count / self._rate
        await asyncio.sleep(self._free_at - now)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cap: _Cap) -> None:
    try:
        while data := await reader.read(_PIECE_BYTES):
            await cap.spend(len(data))
            writer.write(data)
            await writer.drain()
    except OSError:  # one side has hung up, so the other side must, too
        pass
    finally:
        writer.close()
