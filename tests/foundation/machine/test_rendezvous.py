"""Hosts that meet over real sockets, each in a thread: all go on, or all end with the same error."""

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from threading import Event
from typing import Any

import pytest

from baton.tasks.foundation.contracts.stage_calls import ErrorReport
from baton.tasks.foundation.errors import AcceleratorError, AcceleratorLost, BatonError, RunFileError
from baton.tasks.foundation.machine import rendezvous
from baton.tasks.foundation.machine.cluster import Cluster
from baton.tasks.foundation.machine.host_link import HostLink
from baton.tasks.foundation.machine.rendezvous import (
    Hello,
    Met,
    Patience,
    Proof,
    Verdict,
    _hello_from,
    _mac,
    _receive,
    _send,
    _Signature,
    meet,
)
from tests.support.watching import wait_until
from tests.support.worker_processes import free_addresses

LONG = Patience(connect=60, misled=30, idle=30)


class Hosts:
    """Hosts in threads."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(8)
        self.notes: list[str] = []
        self.told = Event()

    def start(
        self,
        addresses: list[str],
        host: int,
        *,
        refusal: BatonError | None = None,
        nothing_to_do: bool = False,
        patience: Patience = LONG,
        proof: Proof | None = None,
    ) -> "Future[Met]":
        def note(text: str) -> None:
            self.notes.append(text)
            self.told.set()

        cluster = Cluster(tuple(addresses), host)
        settings: dict[str, Any] = {"refusal": refusal, "nothing_to_do": nothing_to_do, "patience": patience}
        return self.pool.submit(meet, cluster, **settings, note=note, proof=proof)


@pytest.fixture
def hosts() -> Hosts:
    return Hosts()


def linked(*futures: "Future[Met]", outcomes: tuple[str, ...]) -> list[HostLink]:
    """The links of hosts that have met, all of which know the outcomes."""
    found = []
    for link, known in (future.result(60) for future in futures):
        assert link is not None
        assert known == outcomes
        found.append(link)
    return found


def refused(*futures: "Future[Met]") -> BatonError:
    """The error of all hosts: of one class, with one message."""
    errors = [future.exception(60) for future in futures]
    assert all(isinstance(error, BatonError) for error in errors), errors
    assert len({(type(error), str(error)) for error in errors}) == 1, errors
    (first, *_) = errors
    assert isinstance(first, BatonError)
    return first


@pytest.mark.parametrize("count", [2, 3])
def test_hosts_meet_in_any_order_and_keep_their_connections(hosts: Hosts, count: int) -> None:
    addresses = free_addresses(count)
    late = Patience(connect=60, first_note=0)
    others = [hosts.start(addresses, host, patience=late) for host in range(1, count)]
    assert hosts.told.wait(60)
    assert "waiting for host 0 (127.0.0.1:" in hosts.notes[0]
    chief, *found = linked(hosts.start(addresses, 0), *others, outcomes=("admitted",) * count)
    for host, each in enumerate(found, start=1):
        each.gather("name", b"%d" % host, seconds=60)
    assert chief.gather("name", b"0", seconds=60) == [b"%d" % host for host in range(count)]
    with socket.create_server(("127.0.0.1", int(addresses[0].rpartition(":")[2]))):
        """The port is free although its connections are open."""
    for each in (chief, *found):
        each.close()


def test_hosts_meet_at_ipv6_addresses(hosts: Hosts) -> None:
    addresses = [each.replace("127.0.0.1", "[::1]") for each in free_addresses(2)]
    for link in linked(*(hosts.start(addresses, host) for host in range(2)), outcomes=("admitted", "admitted")):
        link.close()


def test_a_host_that_does_not_come_is_named_and_has_its_time(hosts: Hosts) -> None:
    addresses = free_addresses(3)
    brief = Patience(connect=2, first_note=0)
    error = refused(*(hosts.start(addresses, host, patience=brief) for host in (0, 1)))
    assert isinstance(error, AcceleratorLost)
    assert str(error).startswith(f"host 2 ({addresses[2]}: Connection refused) did not come within 2 s")
    assert any(f"host 2 ({addresses[2]}" in note for note in hosts.notes), hosts.notes
    error = refused(hosts.start(addresses, 1, patience=brief))
    assert str(error).startswith(f"host 0 ({addresses[0]}: ")


@pytest.mark.parametrize("who", [0, 1, 2])
def test_all_end_with_the_refusal_of_one_also_who_comes_late(hosts: Hosts, who: int) -> None:
    addresses = free_addresses(3)
    first = hosts.start(addresses, who, refusal=RunFileError("no such key"))
    (second, third) = {0, 1, 2} - {who}
    early = hosts.start(addresses, second)
    if second != 0:  # the chief waits for the third, to tell it
        assert isinstance(early.exception(60), RunFileError), "nobody waits for one that has refused"
    error = refused(first, early, hosts.start(addresses, third))
    assert (str(error), error.exit_code) == (f"host {who} refused: no such key", 2)


def test_hosts_with_nothing_to_do_say_so_and_one_alone_does_not_wait(hosts: Hosts) -> None:
    addresses = free_addresses(2)
    both = [hosts.start(addresses, host, nothing_to_do=True) for host in range(2)]
    for link in linked(*both, outcomes=("nothing_to_do", "nothing_to_do")):
        link.close()
    some = [hosts.start(addresses, 0, nothing_to_do=True), hosts.start(addresses, 1)]
    for link in linked(*some, outcomes=("nothing_to_do", "admitted")):
        link.close()
    brief = Patience(connect=60, idle=0)
    for host in range(2):
        alone = hosts.start(addresses, host, nothing_to_do=True, patience=brief)
        assert alone.result(60) == (None, ("nothing_to_do",))


def test_a_wrong_tf_config_is_refused_on_all_that_can_know(hosts: Hosts) -> None:
    a, b, c = free_addresses(3)
    brief = Patience(connect=60, misled=1)

    def started(*of: tuple[list[str], int]) -> str:
        error = refused(*(hosts.start(addresses, host, patience=brief) for addresses, host in of))
        assert isinstance(error, AcceleratorError)
        return str(error)

    differ = "the hosts of this run differ in their addresses: "
    # Another length, and a host too many.
    words = started(([a, b], 0), ([a, b, c], 1))
    assert words.startswith(f"{differ}{a}, {b} on host 0; {a}, {b}, {c} on host 1; give all hosts the same addresses")
    assert started(([a, b], 0), ([a, b, c], 2)).startswith(f"{differ}{a}, {b} on host 0; {a}, {b}, {c} on host 2;")
    # Another address of the chief, and of the other host.
    assert started(([a, b], 0), ([c, b], 1)).startswith(f"{differ}{a}, {b} on host 0; {c}, {b} on host 1;")
    assert started(([a, b], 0), ([a, c], 1)).startswith(f"{differ}{a}, {b} on host 0; {a}, {c} on host 1;")
    # The same index twice on one machine: at one port.
    assert started(([a, b], 0), ([a, b], 0)).startswith("two processes are host 0 (process ")
    assert started(([a, b, c], 0), ([a, b, c], 1), ([a, b, c], 1)).startswith("two processes are host 1 (process ")
    # Two chiefs with different lists.
    words = started(([a, b], 0), ([b, a], 0))
    assert words.startswith(f"{differ}{', '.join(sorted([a, b]))} on host 0; {', '.join(sorted([a, b])[::-1])} on ")


def test_an_address_that_leads_elsewhere_is_refused_on_all(hosts: Hosts) -> None:
    addresses = free_addresses(2)
    brief = Patience(connect=60, misled=1)
    for taken in (0, 1):
        with socket.create_server(("127.0.0.1", int(addresses[taken].rpartition(":")[2]))) as stranger:
            stranger.settimeout(0.1)
            both = [hosts.start(addresses, host, patience=brief) for host in range(2)]
            while not all(future.done() for future in both):
                with suppress(OSError):
                    stranger.accept()[0].close()
        error = str(refused(*both))
        assert addresses[taken] in error
        assert "Address already in use" in error if taken == 0 else "does not lead to it: " in error


def test_a_name_may_lead_elsewhere_for_a_while(hosts: Hosts) -> None:
    """A pod that is started anew has another address, which those who ask for its name learn later."""
    addresses = free_addresses(2)
    port = int(addresses[1].rpartition(":")[2])
    addresses[1] = f"localhost:{port}"
    with socket.create_server(("127.0.0.1", port)) as stranger:
        stranger.settimeout(60)
        chief = hosts.start(addresses, 0, patience=Patience(connect=60, misled=0))
        both = [chief, hosts.start(addresses, 1)]
        for _ in range(15):
            stranger.accept()[0].close()
    for link in linked(*both, outcomes=("admitted", "admitted")):
        link.close()


def connected(address: str) -> socket.socket:
    """A connection to a host that may not listen yet."""
    host, _, port = address.rpartition(":")
    made: list[socket.socket] = []

    def listens() -> bool:
        with suppress(ConnectionRefusedError):
            made.append(socket.create_connection((host, int(port)), timeout=60))
        return bool(made)

    wait_until(listens)
    return made[0]


def hello_of(addresses: list[str], host: int, to: int = 0) -> bytes:
    """A hello whose numbers nobody has checked."""
    said = {"host": host, "to": to, "addresses": addresses, "process": "p", "where": "there", "outcome": "admitted"}
    return json.dumps(said).encode()


STRANGERS: dict[str, Callable[[socket.socket], object]] = {
    "nothing": lambda _: None,
    "a web browser": lambda connection: connection.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"),
    "a huge hello": lambda connection: connection.sendall(b"baton hosts\n" + b"\xff" * 4 + b"x" * 1000),
    "no hello": lambda connection: connection.sendall(b"baton hosts\n" + (2).to_bytes(4) + b"{}"),
    "half a hello": lambda connection: connection.sendall(b"baton ho"),
    "another JSON": lambda connection: connection.sendall(b"baton hosts\n" + (3).to_bytes(4) + b"[1]"),
}  # fmt: skip


def test_strangers_are_ignored(hosts: Hosts) -> None:
    addresses = free_addresses(2)
    chief = hosts.start(addresses, 0)
    connections = []
    for say in STRANGERS.values():
        connections.append(connected(addresses[0]))
        say(connections[-1])
    for name, connection in zip(STRANGERS, connections, strict=True):
        if name not in {"nothing", "half a hello"}:  # these have some seconds
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b"", name
    for link in linked(chief, hosts.start(addresses, 1), outcomes=("admitted", "admitted")):
        link.close()
    for connection in connections:
        connection.close()


@pytest.mark.parametrize(("host", "to"), [(-1, 0), (-2, 0), (99, 0), (1, 7), (1, -7), (2, 0), (2**70, 0)])
def test_who_is_no_host_of_the_list_joins_no_link(hosts: Hosts, host: int, to: int) -> None:
    addresses = free_addresses(2)
    chief = hosts.start(addresses, 0)
    with connected(addresses[0]) as stranger:
        _send(stranger, hello_of(addresses, host, to))
        assert stranger.recv(1) == b"", "it is closed without an answer"
        found = linked(chief, hosts.start(addresses, 1), outcomes=("admitted", "admitted"))
    found[1].send("name", b"1")
    assert found[0].gather("name", b"0", seconds=60) == [b"0", b"1"]
    for link in found:
        link.close()


def test_connections_that_say_nothing_keep_no_host_away(hosts: Hosts) -> None:
    """As soon as one is closed, another one comes."""
    addresses, ended = free_addresses(2), Event()
    chief = hosts.start(addresses, 0, patience=Patience(connect=15))

    def come_again() -> None:
        while not ended.is_set():
            with (
                suppress(OSError),
                socket.create_connection(("127.0.0.1", int(addresses[0].rpartition(":")[2])), timeout=5) as stranger,
            ):
                stranger.sendall(b"baton")
                stranger.recv(1)

    with ThreadPoolExecutor(80) as strangers:
        for _ in range(80):
            strangers.submit(come_again)
        try:
            for link in linked(chief, hosts.start(addresses, 1), outcomes=("admitted", "admitted")):
                link.close()
        finally:
            ended.set()


def test_a_host_that_ends_while_it_waits_is_waited_for_again(hosts: Hosts) -> None:
    addresses = free_addresses(3)
    chief = hosts.start(addresses, 0)
    left = hosts.start(addresses, 1, patience=Patience(connect=0.5))
    assert isinstance(left.exception(60), AcceleratorLost)
    assert not chief.done()
    others = [hosts.start(addresses, host) for host in (1, 2)]
    for link in linked(chief, *others, outcomes=("admitted",) * 3):
        link.close()


def test_a_host_that_found_a_fault_and_ended_is_not_waited_for(hosts: Hosts) -> None:
    """It had another chief on the line, which the first one hears of only by it."""
    addresses = free_addresses(2)
    chief = hosts.start(addresses, 0, patience=Patience(connect=600, misled=600))
    fault = AcceleratorError("two processes are host 0")
    hello = Hello(host=1, to=0, addresses=tuple(addresses), process="p", where="there", outcome="admitted")
    with connected(addresses[0]) as other:
        for message in (hello, _Signature(), Verdict(error=ErrorReport.of(fault))):
            _send(other, message.model_dump_json().encode())
        assert str(refused(chief)) == str(fault)


@pytest.mark.parametrize("ends", ["with a fault", "without a word"])
def test_a_host_that_ends_when_the_chief_has_all_hosts(hosts: Hosts, ends: str) -> None:
    """What it finds then, such as another chief, ends all; who has just died is waited for again."""
    addresses = free_addresses(3)
    fault = AcceleratorError("two processes are host 0")
    hello = Hello(host=1, to=0, addresses=tuple(addresses), process="p", where="there", outcome="admitted")
    all_hosts = [hosts.start(addresses, host) for host in (0, 2)]
    with (
        socket.create_server(("127.0.0.1", int(addresses[1].rpartition(":")[2]))) as listener,
        connected(addresses[0]) as other,
        listener.accept()[0] as reached,
    ):
        for message in (hello, _Signature()):
            _send(other, message.model_dump_json().encode())
        _hello_from(reached, is_answer=False)
        _send(reached, hello.model_copy(update={"is_answer": True}).model_dump_json().encode())
        until = time.monotonic() + 60
        _receive(other, until)  # the chief's hello
        asked = Verdict.model_validate_json(_receive(other, until))
        assert (asked.outcomes, asked.error) == (("admitted",) * 3, None)
        if ends == "with a fault":
            _send(other, Verdict(error=ErrorReport.of(fault)).model_dump_json().encode())
            assert str(refused(*all_hosts)) == str(fault)
    if ends == "without a word":
        for link in linked(*all_hosts, hosts.start(addresses, 1), outcomes=("admitted",) * 3):
            link.close()


class Storage(dict[str, bytes]):
    """Files that hosts share."""

    def proof(self, name: str, uri: str = "file:///shared") -> Proof:
        file = f".probe-{name * 32}-hosts"
        self[file] = b"known to host " + name.encode()
        return Proof(file=file, secret=self[file], storage=uri, read=self.get)


# What a stranger says to the chief, once as a host of the list without a file, and once with the name of a host's file.
STRANGE_HELLOS: dict[str, dict[str, Any]] = {
    "host 1": {},
    "host 1 has refused": {"outcome": "refused", "refusal": ErrorReport.of(RunFileError("m")).model_dump(mode="json")},
    "another list": {"addresses": ["10.0.0.1:2222", "10.0.0.2:2222"]},
    "a second chief": {"host": 0, "chief": ["p", "there"]},
    "led elsewhere": {"to": 1},
}


@pytest.mark.parametrize("file", ["", "1"])
@pytest.mark.parametrize("says", STRANGE_HELLOS)
@pytest.mark.parametrize("to", [0, 1])
def test_a_stranger_ends_no_run_and_joins_none(hosts: Hosts, says: str, file: str, to: int) -> None:
    addresses, shared = free_addresses(2), Storage()
    first = hosts.start(addresses, to, proof=shared.proof(str(to)))
    said = {**json.loads(hello_of(addresses, 1 - to)), "to": to, **STRANGE_HELLOS[says]}
    hello = json.dumps(said | {"proof": f".probe-{file * 32}-hosts" if file else ""}).encode()
    with connected(addresses[to]) as stranger:
        _send(stranger, hello)
        nonce = _hello_from(stranger, is_answer=True).nonce
        _send(stranger, _Signature(mac=_mac(b"guessed", nonce, hello)).to_json())
        assert stranger.recv(1) == b""
        other = hosts.start(addresses, 1 - to, proof=shared.proof(str(1 - to)))
        for link in linked(first, other, outcomes=("admitted", "admitted")):
            link.close()


def test_secrets_are_not_sent_and_a_signature_holds_for_one_connection(hosts: Hosts) -> None:
    addresses, shared = free_addresses(2), Storage()
    chief = hosts.start(addresses, 0, proof=shared.proof("0"))
    proof = shared.proof("1")
    hello = json.dumps({**json.loads(hello_of(addresses, 1)), "proof": proof.file}).encode()
    signature = b""
    for is_first in (True, False):
        with connected(addresses[0]) as other:
            _send(other, hello)
            answer = _hello_from(other, is_answer=True)
            assert shared[answer.proof].decode() not in answer.model_dump_json()
            signature = signature or _Signature(mac=_mac(proof.secret, answer.nonce, hello)).to_json()
            _send(other, signature)
            other.settimeout(1)
            with suppress(TimeoutError):
                assert other.recv(1) == b""
                assert not is_first, "it has joined"
    for link in linked(chief, hosts.start(addresses, 1, proof=proof), outcomes=("admitted", "admitted")):
        link.close()


@pytest.mark.parametrize(("uri", "words"), [("file:///other", ""), ("file:///shared", ", but that is another disk")])
def test_a_host_that_sees_another_storage_is_refused_on_all(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, uri: str, words: str
) -> None:
    monkeypatch.setattr(rendezvous, "STORAGE_SECONDS", 0.5)
    addresses, shared = free_addresses(3), Storage()
    all_hosts = [hosts.start(addresses, host, proof=shared.proof(str(host))) for host in (0, 1)]
    error = refused(*all_hosts, hosts.start(addresses, 2, proof=Storage().proof("2", uri)))
    expected = f"host 2 sees another storage: file:///shared on host 0; {uri} on host 2{words}"
    assert (str(error).splitlines()[0], error.exit_code) == (expected, 2)


@pytest.mark.parametrize("who", [0, 1])
def test_who_cannot_read_its_run_file_is_heard_without_a_storage(hosts: Hosts, who: int) -> None:
    addresses, shared = free_addresses(2), Storage()
    other = hosts.start(addresses, 1 - who, proof=shared.proof("0"))
    error = refused(other, hosts.start(addresses, who, refusal=RunFileError("no such key")))
    assert str(error) == f"host {who} refused: no such key"
