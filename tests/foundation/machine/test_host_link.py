"""Frames between the hosts of a run: nobody waits for a host that is gone."""

import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from baton.tasks.foundation.errors import AcceleratorLost
from baton.tasks.foundation.machine import host_link
from baton.tasks.foundation.machine.host_link import MOST_FRAME_BYTES, HostLink
from tests.support.linked_hosts import linked

LONG = 60.0


@pytest.fixture
def trio() -> Iterator[list[HostLink]]:
    """The links of three hosts, the chief's first."""
    links = linked(3)
    yield links
    for link in links:
        link.close()


def fault_of(work: Callable[[], object]) -> Exception | None:
    try:
        work()
    except Exception as fault:  # noqa: BLE001 - compared by the test
        return fault
    return None


def test_a_frame_waits_for_who_asks_for_its_topic(trio: list[HostLink]) -> None:
    chief, first, second = trio
    first.send("share", b"one")
    second.send("share", b"")
    first.send("facts", b"two")
    first.send("share", b"three")
    assert chief.receive("facts", 1, seconds=LONG) == b"two"
    assert [chief.receive("share", 1, seconds=LONG) for _ in range(2)] == [b"one", b"three"]
    assert chief.receive("share", 2, seconds=LONG) == b""


def test_the_chief_gathers_and_sends_to_every_host(trio: list[HostLink]) -> None:
    chief, *others = trio
    for other in others:
        assert other.gather("name", b"host %d" % other.host, seconds=LONG) is None
    assert chief.gather("name", b"chief", seconds=LONG) == [b"chief", b"host 1", b"host 2"]
    chief.send("answer", b"agreed")
    assert [other.receive("answer", 0, seconds=LONG) for other in others] == [b"agreed"] * 2


def test_threads_send_and_receive_whole_frames_at_once(trio: list[HostLink]) -> None:
    chief, first, _ = trio
    data = {f"topic {number}": os.urandom(3_000_000) for number in range(4)}
    with ThreadPoolExecutor(8) as pool:
        received = {topic: pool.submit(chief.receive, topic, 1, seconds=LONG) for topic in data}
        for sent in [pool.submit(first.send, topic, data[topic]) for topic in data]:
            sent.result()
        assert {topic: each.result() for topic, each in received.items()} == data


def test_a_closed_connection_ends_every_wait_at_once(trio: list[HostLink]) -> None:
    chief, first, second = trio
    first.send("last", b"words")
    with ThreadPoolExecutor(3) as pool:
        waits = [
            pool.submit(fault_of, lambda topic=topic, host=host: chief.receive(topic, host, seconds=1e6))
            for topic, host in (("share", 1), ("share", 1), ("share", 2))
        ]
        second.close()
        for fault in (wait.result(LONG) for wait in waits):
            assert isinstance(fault, AcceleratorLost)
            assert str(fault).startswith("host 2 closed its connection")
    assert chief.receive("last", 1, seconds=LONG) == b"words"  # what came before is still there
    with pytest.raises(AcceleratorLost, match="host 2 closed its connection"):
        chief.receive("last", 1, seconds=1e6)
    chief.close()
    with pytest.raises(AcceleratorLost, match="host 0 closed its connection"):
        first.receive("answer", 0, seconds=1e6)


def test_a_killed_process_is_noticed_though_its_child_lives_on() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    until_closed, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        link = HostLink(1, {0: socket.create_connection(server.getsockname())})
        server.close()
        if os.fork() == 0:
            os.read(until_closed, 1)
            os._exit(0)
        link.send("ready", b"")
        signal.pause()
    connection, _ = server.accept()
    server.close()
    chief = HostLink(0, {1: connection})
    assert chief.receive("ready", 1, seconds=LONG) == b""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with pytest.raises(AcceleratorLost, match="host 1 closed its connection"):
        chief.receive("share", 1, seconds=LONG)
    with pytest.raises(AcceleratorLost, match="host 1"):
        send_until_refused(chief)
    chief.close()
    os.close(end)
    os.close(until_closed)


def send_until_refused(link: HostLink) -> None:
    for _ in range(1000):
        link.send("answer", bytes(1 << 20))


def test_silence_is_lost_after_the_seconds_that_were_given(trio: list[HostLink]) -> None:
    chief, first, _ = trio
    first.send("facts", b"")
    with pytest.raises(AcceleratorLost, match="host 1 sent no share for 0 s"):
        chief.receive("share", 1, seconds=0.01)
    first.send("share", b"late")
    assert chief.receive("share", 1, seconds=LONG) == b"late"


def test_a_frozen_host_is_lost_though_its_connection_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_link, "_BEAT_SECONDS", 0.02)
    chief, other = linked(2)
    for _ in range(3):  # while a host lives, it is heard again and again
        heard = chief.last_heard(1)
        while chief.last_heard(1) == heard:
            with pytest.raises(AcceleratorLost, match="host 1 sent no share"):
                chief.receive("share", 1, seconds=0.01)
    monkeypatch.setattr(other, "_send", lambda *_: None)
    monkeypatch.setattr(host_link, "_SILENT_SECONDS", 0.2)
    with pytest.raises(AcceleratorLost, match="host 1 has been silent for"):
        chief.receive("share", 1, seconds=1e6)
    chief.close()


def test_close_ends_the_waits_of_its_own_process(trio: list[HostLink]) -> None:
    chief = trio[0]
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        chief.receive("share", 1, seconds=1e6)

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(fault_of, wait)
        waiting.wait()
        chief.close()
        assert isinstance(found.result(LONG), AcceleratorLost)


def test_what_is_too_large_is_not_sent_and_not_read() -> None:
    here, there = socket.socketpair()
    link = HostLink(1, {0: here})
    with pytest.raises(ValueError, match="at most"):
        link.send("share", bytes(MOST_FRAME_BYTES + 1))
    with pytest.raises(ValueError, match="at most"):
        link.send("s" * 201, b"")
    there.sendall(struct.pack("!IH", MOST_FRAME_BYTES + 1, 5))
    with pytest.raises(AcceleratorLost, match=f"host 0 sent a frame of {MOST_FRAME_BYTES + 1} bytes"):
        link.receive("share", 0, seconds=LONG)
    there.close()
    link.close()
