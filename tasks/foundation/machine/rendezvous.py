"""How the hosts of a run meet before TensorFlow is imported: each finds the chief, and all of them go on or none does.

Every host has checked its part of the command alone, and may have refused. If it left now, the others would wait for it
in TensorFlow, without an end. So all of them meet first, at their addresses in `TF_CONFIG`: each listens at its port
and connects to the chief's address, and the chief connects to the address of each. The two *hellos* of a connection say
who is at its ends. So a doubled index, a second chief, a list of other addresses and an address that leads elsewhere
are found by those who can know, and a host that has refused says why. The chief decides, and tells all hosts the same:
go on, or end with this error. Before they go on it asks each: its answer is a fault that it has found meanwhile, or the
promise to do as the chief says. A host that comes late is told as well. One that does not come at all is named from
time to time, and has `accelerator.connect_seconds`.

Anybody can connect to a port, so who connects has to show that it can write to the storage of the run: it names a file
that it has created there, and sends an HMAC of the listener's nonce and its own hello under the content, which is never
sent (`Proof`). What listens at the addresses of the list is believed, also by a host that knows no storage because it
cannot read its run file: the chief hears of its refusal when it connects to its address. Everything else is closed and
forgotten. A hello is bounded in bytes and seconds, and of too many connections that have said none the oldest is
closed. The connection from each host to the chief stays open as the `HostLink`. The ports are free again when the
meeting ends, for TensorFlow's own server: SO_REUSEADDR lets it listen although there are connections at its port.
"""

import hmac
import ipaddress
import os
import queue
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, Self

from pydantic import Field, model_validator

from baton.tasks.foundation.contracts.base import Contract
from baton.tasks.foundation.contracts.placement import split_address
from baton.tasks.foundation.contracts.stage_calls import ErrorReport
from baton.tasks.foundation.errors import AcceleratorError, AcceleratorLost, BatonError, InvalidInput
from baton.tasks.foundation.machine.cluster import Cluster
from baton.tasks.foundation.machine.host_link import HostLink, bytes_from
from baton.tasks.foundation.text import counted, listed, message

Outcome = Literal["admitted", "nothing_to_do", "refused"]

_MAGIC: Final = b"baton hosts\n"
_LENGTH_BYTES: Final = 4
_MOST_BYTES: Final = 1 << 20
_HELLO_SECONDS: Final = 5.0
_MOST_GREETED: Final = 64  # connections whose hello is awaited at the same time
_POLL_SECONDS: Final = 0.1
_TELLING_SECONDS: Final = 3.0
# A shared disk may show what another machine has written a little later.
STORAGE_SECONDS: Final = 10.0
_SOON_SECONDS: Final = 3.0
_REMEDY: Final = "give all hosts the same addresses, and each its own index (TF_CONFIG, or what `baton hosts` prints)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the hosts wait for each other, in seconds.

    Attributes:
        connect: for a host that does not come; `accelerator.connect_seconds`.
        first_note: until the missing hosts are named.
        next_note: until they are named again.
        misled: for an address that does not lead to its host, although that host has come.
        renamed: the same for a name: caches have the address that a host had before it was started anew elsewhere.
        idle: for the others, if nothing is left to do on this host.
    """

    connect: float = 600
    first_note: float = 30
    next_note: float = 60
    misled: float = 20
    renamed: float = 120
    idle: float = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How a host shows that it is one of the run, and sees whether others are.

    Attributes:
        file: path of a file that this host has created in the storage; `PROOF_FILE`.
        secret: its content.
        storage: address of the storage root, for messages.
        read: reads such a file of another host; None if it is not there.
    """

    file: str
    secret: bytes
    storage: str
    read: Callable[[str], bytes | None]


PROOF_FILE: Final = r"^(\.probe-[0-9a-f]{32}-hosts)?$"


class Hello(Contract):
    """What a host says of itself to another one; `host` and `to` are indices in its list of addresses."""

    format: Literal[1] = 1
    host: int = Field(ge=0)
    to: int = Field(ge=0)
    addresses: tuple[str, ...]
    process: str
    where: str
    outcome: Outcome
    refusal: ErrorReport | None = None
    is_answer: bool = False
    chief: tuple[str, str] | None = None  # that this host follows, or is: its process, and where that is
    proof: str = Field(default="", pattern=PROOF_FILE)
    storage: str = ""
    nonce: str = ""  # of an answer

    @model_validator(mode="after")
    def _is_of_the_list(self) -> Self:
        # An answer goes to who has asked, whose list may be longer.
        if max(self.host, 0 if self.is_answer else self.to) >= len(self.addresses):
            raise ValueError(f"host {self.host} and to {self.to} of {len(self.addresses)} addresses")
        return self


class _Signature(Contract):
    """What follows the hello of who connects: its HMAC; empty from who has no `Proof`."""

    mac: str = ""


class Verdict(Contract):
    """What the chief tells a host: to go on with these outcomes of the hosts, or to end with an error.

    The chief asks with what it is about to tell. A host answers with the fault that it has found, or with none.
    """

    error: ErrorReport | None = None
    outcomes: tuple[Outcome, ...] = ()


# The link to the chief, or on the chief to all others, and the outcomes of all hosts by index. No link: this host has
# left, because nothing is left to do on it.
Met = tuple[HostLink | None, tuple[Outcome, ...]]


@dataclass(slots=True)
class _Came:
    """An event: a connection with the hello of its other end, or why it could not be made.

    Attributes:
        hello: of the other end.
        connection: to it.
        dialed: the host whose address this process has connected to; None: the other end has connected.
        told: whether this process's hello had a refusal.
        fault: why there is no connection.
    """

    hello: Hello | None
    connection: socket.socket | None
    dialed: int | None = None
    told: bool = False
    fault: str = ""


@dataclass(slots=True)
class _Joined:
    hello: Hello
    connection: socket.socket
    since: float


def meet(
    cluster: Cluster,
    *,
    refusal: BatonError | None,
    nothing_to_do: bool,
    patience: Patience,
    note: Callable[[str], object],
    proof: Proof | None = None,
) -> Met:
    """Meet the other hosts, and learn whether all of them can go on.

    Args:
        cluster: of at least two hosts.
        refusal: why this host cannot go on; None if it can.
        nothing_to_do: whether this host has nothing to do.
        patience: how long to wait.
        note: receives a line about hosts that are missing.
        proof: what shows that this host is one of the run; None if it knows no storage: then who connects shows
            nothing.

    Returns:
        The link, and the outcomes of all hosts.

    Raises:
        BatonError: a host has refused; of its class, and the same on all hosts. Whoever refused raises it too.
        AcceleratorError: TF_CONFIG differs between hosts, or an address leads elsewhere.
        InvalidInput: a host sees another storage than the chief.
        AcceleratorLost: a host did not come.
    """
    meeting = _Meeting(cluster, refusal, nothing_to_do=nothing_to_do, patience=patience, note=note, proof=proof)
    try:
        return meeting.as_chief() if cluster.host == 0 else meeting.as_other()
    finally:
        meeting.close()


def refusal_of(host: int, error: BatonError) -> BatonError:
    """The error of a host, as all hosts raise it: of the same class, and with the name of the host."""
    report = _report(error)
    return report.model_copy(update={"message": f"host {host} refused: " + report.message}).to_error()


def _report(error: BatonError) -> ErrorReport:
    """What other hosts are told of an error: where it was raised is of no use to them."""
    return ErrorReport.of(error).model_copy(update={"traceback": None})


class _Meeting:
    """The threads that listen and connect, and what is known of the other hosts. One thread decides."""

    def __init__(
        self,
        cluster: Cluster,
        refusal: BatonError | None,
        *,
        nothing_to_do: bool,
        patience: Patience,
        note: Callable[[str], object],
        proof: Proof | None,
    ) -> None:
        self._addresses, self._host = cluster.addresses, cluster.host
        self._refusal = None if refusal is None else refusal_of(cluster.host, refusal)
        self._outcome: Outcome = "refused" if refusal else "nothing_to_do" if nothing_to_do else "admitted"
        self._patience, self._note, self._proof = patience, note, proof
        self._process = uuid.uuid4().hex
        self._where = f"process {os.getpid()} on {socket.gethostname()}"
        self._began = time.monotonic()
        # Whoever waits only to tell others says it soon.
        self._next_note = self._began + (min(patience.first_note, _SOON_SECONDS) if refusal else patience.first_note)
        self._came: queue.SimpleQueue[_Came] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._chief = (self._process, self._where) if cluster.host == 0 else None
        self._port_taken, self._dials_itself, self._is_wrong = "", False, False
        self._faults: dict[int, str] = {}
        self._unseen: dict[str, float] = {}  # processes of chiefs whose file is not there, and since when
        self._joined: dict[int, _Joined] = {}
        self._reached: dict[int, float] = {}
        self._told: set[int] = set()
        self._strays: list[socket.socket] = []
        self._greeted: dict[socket.socket, None] = {}  # connections without a hello, the oldest first
        self._listener = threading.Thread(target=self._listen, name="baton-meeting", daemon=True)
        self._listener.start()

    # What all hosts do.

    def close(self) -> None:
        """Stop listening and connecting; the port is free on return. Connections that were not handed on are closed."""
        self._stopped.set()
        self._listener.join()
        with suppress(queue.Empty):
            while True:
                self._drop(self._came.get_nowait().connection)
        for connection in [*self._strays, *(each.connection for each in self._joined.values())]:
            self._drop(connection)

    def as_chief(self) -> Met:
        """Wait for every host, and tell all of them the same."""
        for other in self._others:
            self._dial(other)
        verdict = self._refusal
        while verdict is None:
            verdict = self._problem()
            missing = [other for other in self._others if not (other in self._joined and other in self._reached)]
            if verdict is None and not missing:
                try:
                    if (met := self._go_on()) is not None:
                        return met
                except BatonError as fault:
                    verdict = fault
                continue
            if verdict is None and self._leaves_idle():
                return None, (self._outcome,)
            if verdict is None and self._waited() > self._patience.connect:
                verdict = self._missing_error(missing)
            self._tell_of(missing)
        self._tell_all(verdict)
        raise verdict

    def as_other(self) -> Met:
        """Connect to the chief, and do what it says."""
        self._dial(0)
        while True:
            try:
                self._take_in()
                self._require_port()
                verdict = self._verdict()
            except BatonError as fault:
                for each in self._joined.values():  # the chief may not know it
                    self._say(each.connection, Verdict(error=ErrorReport.of(fault)))
                raise
            if verdict is not None and verdict.error is not None:
                raise verdict.error.to_error()
            if verdict is not None:
                chief = self._joined.pop(0)
                self.close()
                return HostLink(self._host, {0: chief.connection}), verdict.outcomes
            if self._leaves_idle():
                return None, (self._outcome,)
            # The chief may have come long after this host, and waits for the others as long.
            since = self._joined[0].since + _HELLO_SECONDS if 0 in self._joined else self._began
            if time.monotonic() - since > self._patience.connect:
                raise self._refusal or self._missing_error([] if 0 in self._joined else [0])
            if 0 not in self._joined:
                self._tell_of([0], of_verdict=self._refusal)

    def _require_port(self) -> None:
        """Check that this host can listen; if it has met the chief, the chief finds it out, and tells all."""
        if self._port_taken and 0 not in self._joined and self._waited() > self._patience.misled:
            raise AcceleratorError(
                f"the port of host {self._host}, {self._addresses[self._host]}, cannot be used: "
                f"{self._port_taken}; end the program that has it, or give the host another port, on all hosts"
            )

    def _waited(self) -> float:
        return time.monotonic() - self._began

    def _leaves_idle(self) -> bool:
        """Whether this host has nothing to do, as all that have come, and the others had their time."""
        idle = {self._outcome, *(each.hello.outcome for each in self._joined.values())} == {"nothing_to_do"}
        return idle and self._waited() > self._patience.idle

    def _tell_of(self, missing: list[int], *, of_verdict: BatonError | None = None) -> None:
        """Name the hosts that are missing, from time to time; a refusal is said with them."""
        if time.monotonic() < self._next_note:
            return
        self._next_note = time.monotonic() + self._patience.next_note
        text = f"waiting for {self._named(missing)}, up to {self._patience.connect:.0f} s in all"
        self._note(text if of_verdict is None else f"{text}, to tell them: {of_verdict}")

    def _named(self, hosts: list[int]) -> str:
        return listed([f"host {host} ({self._addresses[host]}{self._why(host)})" for host in hosts])

    def _why(self, host: int) -> str:
        fault = self._faults.get(host, "")
        return f": {fault}" if fault else ""

    def _missing_error(self, missing: list[int]) -> AcceleratorLost:
        who = self._named(missing) if missing else "another host"
        return AcceleratorLost(
            f"{who} did not come within {self._patience.connect:g} s (accelerator.connect_seconds); start the same "
            f"command on all {counted(len(self._addresses), 'host')}, and check that their addresses can be reached"
        )

    def _take_in(self) -> None:
        """Wait a moment for a connection, and put it where it belongs.

        Raises:
            BatonError: what its other end says cannot be, or refuses the run.
        """
        try:
            came = self._came.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            return
        hello = came.hello
        if hello is None or came.connection is None:
            if came.dialed is not None:
                self._faults[came.dialed] = came.fault
            return
        to = hello.to if came.dialed is None else came.dialed
        if hello.process == self._process and to == self._host:
            self._drop(came.connection)  # the port became free while this process tried it
            return
        if came.told:
            self._told.add(hello.host)
        try:
            self._require_fitting(hello, to, self._host if came.dialed is None else hello.host)
        except BatonError:
            self._strays.append(came.connection)  # its other end is told the error
            self._is_wrong |= hello.refusal is None
            if hello.refusal is None or came.dialed is None:  # who has refused comes to hear it
                self._told.add(hello.host)
            raise
        self._place(came, hello, came.connection)

    def _place(self, came: _Came, hello: Hello, connection: socket.socket) -> None:
        if came.dialed is None and self._host != 0:  # the chief has tried this host's address
            self._drop(connection)
        elif came.dialed is not None and self._host == 0:
            self._faults.pop(came.dialed, None)
            self._reached[came.dialed] = time.monotonic()
            self._drop(connection)
        else:
            other = hello.host
            self._faults.pop(other, None)
            self._joined[other] = _Joined(hello, connection, time.monotonic())
            if self._host != 0:
                self._chief = (hello.process, hello.where)

    def _require_fitting(self, hello: Hello, to: int, found: int) -> None:
        """Check what the other end of a connection says of itself; both ends find the same, in the same words.

        Args:
            hello: of the other end.
            to: the host whose address was connected to.
            found: the host that was found there.
        """
        if hello.addresses != self._addresses:
            sides = sorted([(hello.host, hello.addresses), (self._host, self._addresses)])
            words = [f"{', '.join(addresses)} on host {host}" for host, addresses in sides]
            more = "" if hello.host != self._host else f" ({self._both(hello)})"
            raise AcceleratorError(
                f"the hosts of this run differ in their addresses: {'; '.join(words)}{more}; {_REMEDY}"
            )
        if to != found:
            raise AcceleratorError(
                f"the address of host {to}, {self._addresses[to]}, leads to a process that is host {found}; {_REMEDY}"
            )
        if hello.host == self._host:
            raise self._doubled(self._host, self._both(hello))
        if hello.chief is not None and self._chief is not None and hello.chief != self._chief:
            raise self._doubled(0, _pair(hello.chief[1], self._chief[1]))
        known = self._joined.get(hello.host)
        if known is not None and known.hello.process != hello.process and _peek(known.connection) != b"":
            raise self._doubled(hello.host, _pair(known.hello.where, hello.where))
        if hello.refusal is not None:
            raise hello.refusal.to_error()

    def _both(self, hello: Hello) -> str:
        return _pair(self._where, hello.where)

    def _doubled(self, host: int, which: str) -> AcceleratorError:
        return AcceleratorError(f"two processes are host {host} ({which}); {_REMEDY}")

    # What the chief does.

    def _go_on(self) -> Met | None:
        """Go on with all hosts, if each still does; None if one has ended, and is waited for again.

        Raises:
            BatonError: what a host has found, and ends with.
        """
        outcomes = (self._outcome, *(self._joined[other].hello.outcome for other in sorted(self._joined)))
        verdict, until = Verdict(outcomes=outcomes), time.monotonic() + _HELLO_SECONDS
        for each in self._joined.values():
            self._say(each.connection, verdict)
        for other in list(self._joined):
            self._hear(other, until)
        if len(self._joined) < len(self._others):
            for other in list(self._joined):  # they come again
                self._forget(other)
            return None
        connections = {other: each.connection for other, each in self._joined.items()}
        for connection in connections.values():
            self._say(connection, verdict)
        self._joined = {}
        self.close()
        return HostLink(0, connections), outcomes

    @property
    def _others(self) -> range:
        return range(1, len(self._addresses))

    def _problem(self) -> BatonError | None:
        """Take in what has connected. Returns why the run cannot go on; None if nothing speaks against it."""
        try:
            self._take_in()
            if self._port_taken and not self._dials_itself:
                self._dial(0)  # a second chief on this machine may have the port
                self._dials_itself = True
            self._forget_lost()
            self._require_addresses()
        except BatonError as fault:
            return fault
        return None

    def _require_addresses(self) -> None:
        """Check that the hosts that have come can also be reached, as TensorFlow will do."""
        now = time.monotonic()
        self._require_port()
        for other in [each for each, when in self._reached.items() if now - when > _HELLO_SECONDS]:
            if other not in self._joined:  # it may follow another chief meanwhile
                self._dial_again(other)
        for other, each in sorted(self._joined.items()):
            late = self._patience.renamed if _is_name(self._addresses[other]) else self._patience.misled
            if other not in self._reached and now - each.since > late:
                raise AcceleratorError(
                    f"host {other} ({each.hello.where}) has come, but its address, "
                    f"{self._addresses[other]}, does not lead to it{self._why(other)}; {_REMEDY}"
                )

    def _forget_lost(self) -> None:
        """Wait again for hosts that have ended meanwhile.

        Raises:
            BatonError: what a host has found, and ends with.
        """
        for other, each in list(self._joined.items()):
            if _peek(each.connection) is not None:
                self._hear(other, time.monotonic() + _HELLO_SECONDS)

    def _hear(self, other: int, until: float) -> None:
        try:
            found = Verdict.model_validate_json(_receive(self._joined[other].connection, until)).error
        except (OSError, ValueError):
            self._forget(other)
            return
        if found is not None:  # a fault of the list; its own refusal came with its hello
            self._is_wrong = True
            self._told.add(other)
            self._drop(self._joined.pop(other).connection)
            raise found.to_error()

    def _forget(self, other: int) -> None:
        self._drop(self._joined.pop(other).connection)
        self._dial_again(other)

    def _dial_again(self, other: int) -> None:
        if other in self._reached:
            del self._reached[other]
            self._dial(other)

    def _tell_all(self, verdict: BatonError) -> None:
        """Tell every host, also one that is not here yet, as long as it has its time."""
        until = self._began + self._patience.connect
        if self._is_wrong:  # not every host of a wrong list need exist
            until = min(until, time.monotonic() + self._patience.misled)
        self._next_note = time.monotonic() + min(self._patience.first_note, _SOON_SECONDS)
        self._refusal = verdict  # in every hello from now on
        self._tell(verdict)
        for other in self._others:
            if other not in self._told:
                self._dial_again(other)
        while (untold := [other for other in self._others if other not in self._told]) and time.monotonic() < until:
            self._tell_of(untold, of_verdict=verdict)
            self._problem()  # only the first one counts
            self._tell(verdict)

    def _tell(self, verdict: BatonError) -> None:
        """Tell the hosts that are here, and close their connections."""
        said = Verdict(error=_report(verdict))
        connections = [*(each.connection for each in self._joined.values()), *self._strays]
        self._told |= self._joined.keys()
        self._joined, self._strays = {}, []
        sent = [connection for connection in connections if self._say(connection, said)]
        until = time.monotonic() + _TELLING_SECONDS
        for connection in connections:
            _drain(connection, until if connection in sent else 0)
            self._drop(connection)

    # What other hosts do.

    def _verdict(self) -> Verdict | None:
        """What the chief says; None if it says nothing yet. If it is gone, it is looked for again."""
        chief = self._joined.get(0)
        if chief is None or _peek(chief.connection) is None:
            return None
        try:
            verdict = Verdict.model_validate_json(_receive(chief.connection, time.monotonic() + _HELLO_SECONDS))
            if verdict.error is None:  # it asks
                self._say(chief.connection, Verdict())
                until = time.monotonic() + 2 * _HELLO_SECONDS  # other hosts have half of it to answer
                verdict = Verdict.model_validate_json(_receive(chief.connection, until))
        except (OSError, ValueError):
            self._drop(self._joined.pop(0).connection)
            self._chief = None
            self._stopped.wait(_POLL_SECONDS)  # it may not see this host's file yet
            self._dial(0)
            return None
        return verdict

    # What the threads do.

    def _hello(self, to: int, *, is_answer: bool = False, nonce: str = "") -> bytes:
        report = None if self._refusal is None else _report(self._refusal)
        hello = Hello(
            host=self._host, to=to, addresses=self._addresses, process=self._process, where=self._where,
            outcome=self._outcome, refusal=report, is_answer=is_answer, chief=self._chief, nonce=nonce,
            proof=self._proof.file if self._proof else "", storage=self._proof.storage if self._proof else "",
        )  # fmt: skip
        return hello.model_dump_json().encode()

    def _listen(self) -> None:
        listener = self._bound()
        if listener is None:
            return
        with listener:
            listener.settimeout(_POLL_SECONDS)
            while not self._stopped.is_set():
                try:
                    connection, _ = listener.accept()
                except OSError:  # nothing has connected, or it is gone again
                    continue
                self._greeted[connection] = None
                for oldest in list(self._greeted)[:-_MOST_GREETED]:  # a host of this run says its hello at once
                    with suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
                threading.Thread(target=self._greet, args=(connection,), name="baton-hello", daemon=True).start()

    def _bound(self) -> socket.socket | None:
        """A socket that listens at this host's port; None if the meeting ends before the port is free."""
        while not self._stopped.is_set():
            try:
                port = split_address(self._addresses[self._host])[1]
                if socket.has_dualstack_ipv6():
                    listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
                else:
                    listener = socket.create_server(("", port))
            except OSError as fault:
                self._port_taken = _words(fault)
                self._stopped.wait(_POLL_SECONDS)
            else:
                self._port_taken = ""
                return listener
        return None

    def _greet(self, connection: socket.socket) -> None:
        """Read the hello of a process that has connected, and answer; a stranger is forgotten."""
        try:
            data, nonce = _receive(connection, time.monotonic() + _HELLO_SECONDS), secrets.token_hex()
            hello, told = _parsed(data, is_answer=False), self._refusal is not None
            _send(connection, self._hello(hello.host, is_answer=True, nonce=nonce))
            signature = _Signature.model_validate_json(_receive(connection, time.monotonic() + _HELLO_SECONDS))
            # Who comes only to hear what a chief refuses need not show anything.
            if not (told and self._host == 0):
                self._require_proof(hello, data, nonce, signature.mac)
        except (OSError, ValueError, BatonError):
            self._drop(connection)
        else:
            self._arrive(_Came(hello, connection, told=told))
        finally:
            self._greeted.pop(connection, None)

    def _require_proof(self, hello: Hello, data: bytes, nonce: str, mac: str) -> None:
        """Check that who has connected knows what is in its file. A host without a storage refuses, and cannot tell.

        Raises:
            ValueError: it does not.
        """
        if self._proof is None and self._refusal is None:
            return
        secret = self._proof.read(hello.proof) if self._proof and hello.proof else None
        if secret is None or not hmac.compare_digest(_mac(secret, nonce, data).encode(), mac.encode()):
            if hello.addresses == self._addresses:
                why = "who connects in its name does not show that it sees the storage of this host"
                self._arrive(_Came(None, None, dialed=hello.host, fault=why))
            raise ValueError("a stranger")

    def _require_storage_of(self, chief: Hello) -> None:
        """Look for the file of the chief. A host that does not find it for some seconds refuses.

        Raises:
            ValueError: it is not there.
        """
        if self._proof is None or not chief.proof or chief.refusal is not None or self._proof.read(chief.proof):
            return
        same = chief.storage == self._proof.storage
        since = self._unseen.setdefault(chief.process, time.monotonic())
        if time.monotonic() - since >= (STORAGE_SECONDS if same else 0):
            self._refusal, self._outcome = self._other_storage(chief, self._proof), "refused"
        raise ValueError("another storage")

    def _other_storage(self, chief: Hello, mine: Proof) -> BatonError:
        other = ", but that is another disk" if chief.storage == mine.storage else ""
        return InvalidInput(
            message(
                f"host {self._host} sees another storage: {chief.storage} on host 0; {mine.storage} on host "
                f"{self._host}{other}",
                hints=["all hosts need one storage: a bucket, or a shared disk that is mounted at the same path"],
            )
        )

    def _dial(self, other: int) -> None:
        """Connect to a host's address in a thread, until it answers."""
        threading.Thread(target=self._connect, args=(other,), name=f"baton-dial-{other}", daemon=True).start()

    def _connect(self, other: int) -> None:
        while not self._stopped.is_set():
            connection, told = None, self._refusal is not None
            try:
                host, port = split_address(self._addresses[other])
                connection = socket.create_connection((host, port), timeout=_HELLO_SECONDS)
                _send(connection, data := self._hello(other))
                hello = _hello_from(connection, is_answer=True)
                mac = "" if self._proof is None else _mac(self._proof.secret, hello.nonce, data)
                _send(connection, _Signature(mac=mac).to_json())
                if self._host != 0:
                    self._require_storage_of(hello)
            except (OSError, ValueError, BatonError) as fault:
                self._drop(connection)
                self._arrive(_Came(None, None, dialed=other, fault=_words(fault)))
                self._stopped.wait(_POLL_SECONDS * 2)
            else:
                # A host that knows its storage believes only what it hears when it connects itself.
                self._arrive(_Came(hello, connection, dialed=other, told=told and not hello.proof))
                return

    def _arrive(self, came: _Came) -> None:
        self._came.put(came)
        if self._stopped.is_set():
            self._drop(came.connection)

    def _say(self, connection: socket.socket, verdict: Verdict) -> bool:
        try:
            _send(connection, verdict.model_dump_json().encode())
        except OSError:  # it has ended
            return False
        return True

    def _drop(self, connection: socket.socket | None) -> None:
        if connection is not None:
            connection.close()


def _is_name(address: str) -> bool:
    try:
        ipaddress.ip_address(split_address(address)[0])
    except ValueError:
        return True
    return False


def _pair(one: str, other: str) -> str:
    return " and ".join(sorted((one, other)))


def _words(fault: Exception) -> str:
    if isinstance(fault, OSError):
        return fault.strerror or str(fault) or type(fault).__name__
    if isinstance(fault, BatonError):  # of this host's own storage
        return str(fault)
    return "what listens there is no host of a run that begins"


def _hello_from(connection: socket.socket, *, is_answer: bool) -> Hello:
    return _parsed(_receive(connection, time.monotonic() + _HELLO_SECONDS), is_answer=is_answer)


def _mac(secret: bytes, nonce: str, hello: bytes) -> str:
    return hmac.new(secret, nonce.encode() + hello, "sha256").hexdigest()


def _parsed(data: bytes, *, is_answer: bool) -> Hello:
    hello = Hello.model_validate_json(data)
    if hello.is_answer != is_answer:  # a connection to a port that nobody listens at can end in itself
        raise ValueError("not an answer" if is_answer else "an answer")
    return hello


def _send(connection: socket.socket, data: bytes) -> None:
    connection.settimeout(_HELLO_SECONDS)
    connection.sendall(_MAGIC + len(data).to_bytes(_LENGTH_BYTES) + data)


def _receive(connection: socket.socket, until: float) -> bytes:
    """A message, read to its last byte and no further.

    Raises:
        OSError: the connection ended, or `until` came first.
        ValueError: it is none of Baton's.
    """
    try:
        for byte in _MAGIC:  # one by one: a stranger need not send as many
            if bytes_from(connection, 1, until=until)[0] != byte:
                raise ValueError("not a hello")
        size = int.from_bytes(bytes_from(connection, _LENGTH_BYTES, until=until))
        if size > _MOST_BYTES:
            raise ValueError(f"a hello of {size} bytes")
        return bytes_from(connection, size, until=until)
    except EOFError as ended:
        raise ConnectionError(str(ended)) from None


def _peek(connection: socket.socket) -> bytes | None:
    """The next byte, which stays unread; none if the other end is gone; None if there is nothing to read."""
    connection.settimeout(0)
    try:
        return connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _drain(connection: socket.socket, until: float) -> None:
    """Wait until the other end has read all and closes: closed before, a connection may lose what was sent."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        while (left := until - time.monotonic()) > 0:
            connection.settimeout(left)
            if not connection.recv(1 << 16):
                return
