"""What the hosts of a run agree on: one answer to whether it may train, the same settings and code, one storage.

Each host admits the run alone (`admit.py`). Then all of them meet (`machine/rendezvous.py`), before TensorFlow is
imported, and before data and model. Each has just created a file in its storage, by which it shows that it is one of
the run, and which the others read: same settings and another disk would be two runs. If one has refused, all end with
its error. Otherwise they send the chief what must be the same on all of them, and read the newest entry that it has
read. The chief compares, and all end with the same message, or go on. What they agreed on is in the log as a digest,
with each commit.

Only TensorFlow tells the rest, so that is compared later: Keras's configuration here, the built model by
init-or-restore, and the traced step by train-segment.
"""

import hashlib
import json
import os
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import Field

from baton.flows.opened_run import OpenedRun
from baton.flows.result import Goal
from baton.tasks.foundation.contracts.base import Contract
from baton.tasks.foundation.contracts.stage_calls import ErrorReport
from baton.tasks.foundation.errors import AcceleratorError, AcceleratorLost, BatonError, FileMissing, InvalidInput
from baton.tasks.foundation.log.files import entry_path
from baton.tasks.foundation.machine.cluster import Cluster, cluster_of
from baton.tasks.foundation.machine.collectives import (
    OneHost,
    comparable,
    differences_between,
    refuse_difference,
)
from baton.tasks.foundation.machine.environment import deciding_variables, installed_versions, thread_counts
from baton.tasks.foundation.machine.host_link import HostLink
from baton.tasks.foundation.machine.rendezvous import STORAGE_SECONDS, Patience, Proof, meet, refusal_of
from baton.tasks.foundation.model.saved_code import collect_code, source_digest
from baton.tasks.foundation.storage.interface import Storage, discard
from baton.tasks.foundation.telemetry.events import Note, Sink

if TYPE_CHECKING:
    from baton.tasks.foundation.machine.devices import Accelerator

_TOPIC: Final = "agreement"
# A store that does not respond is tried again for minutes.
_SECONDS: Final = 600.0
_POLL_SECONDS: Final = 0.2
# A run is met for once in a process: then TensorFlow has the port.
_met: list[HostLink] = []


class _FromChief(Contract):
    """What the chief asks of the other hosts, and later decides."""

    error: ErrorReport | None = None
    head: int | None = None
    digest: str = ""
    agreed: str = ""


class _OfHost(Contract):
    """What a host tells the chief: what must be the same, and whether it sees the chief's newest entry; or an error."""

    error: ErrorReport | None = None
    values: dict[str, object] = Field(default_factory=dict)
    sees_head: bool = True


@contextmanager
def refusals_told(file: Path, overrides: Sequence[str], *, note: Callable[[str], object]) -> Iterator[None]:
    """Tell the other hosts what the block refuses. It reads the run file, so what is not read yet cannot be asked.

    Args:
        overrides: settings that replace those of the file.
        note: receives a line about hosts that are missing.
    """
    try:
        yield
    except BatonError as fault:
        text = " ".join(overrides)
        with suppress(OSError, UnicodeDecodeError):
            text += file.read_text(encoding="utf-8")
        cluster = None
        if "multi_worker" in text:
            with suppress(AcceleratorError):
                cluster = cluster_of(os.environ)
        if cluster is not None and len(cluster.addresses) > 1:
            meet(cluster, refusal=fault, nothing_to_do=False, patience=Patience(), note=note)
        raise


def agree(
    cluster: Cluster,
    run: OpenedRun,
    goal: Goal,
    *,
    accept: Sequence[str],
    refusal: BatonError | None,
    nothing_to_do: bool,
    telemetry: Sink,
) -> HostLink | None:
    """Meet the other hosts, and go on only if all agree.

    Args:
        cluster: of `several_hosts`.
        goal: how far the command goes.
        accept: identity keys whose change is accepted.
        refusal: why this host does not admit the run; None if it does.
        nothing_to_do: whether this host has nothing to do.
        telemetry: receives notes about hosts that are missing.

    Returns:
        The link to the other hosts; None if nothing is left to do.

    Raises:
        BatonError: a host has refused, or they differ; the same on all hosts.
        AcceleratorLost: a host did not come, or went away.
    """
    if _met:
        raise AcceleratorLost("this process has trained with other hosts before; start another one on each of them")
    telemetry.emit(Note(text=f"waiting for all hosts: {', '.join(cluster.addresses)}"))
    proof = None
    if refusal is None:
        try:
            proof = _proof_in(run.root)
        except BatonError as fault:
            refusal = None if nothing_to_do else fault
    try:
        link, outcomes = meet(
            cluster,
            refusal=refusal,
            nothing_to_do=nothing_to_do,
            patience=Patience(connect=run.spec.accelerator.connect_seconds),
            note=lambda text: telemetry.emit(Note(text=text)),
            proof=proof,
        )
    finally:
        if proof is not None:
            discard(run.root, proof.file)
    if link is None:
        return None
    idle = [host for host, outcome in enumerate(outcomes) if outcome == "nothing_to_do"]
    if len(idle) == len(outcomes):
        link.close()
        return None
    try:
        link.agreed = _compare(link, run, _values(run, goal, accept))
    except BaseException:
        link.close()
        raise
    if idle:
        link.close()
        raise AcceleratorLost(
            f"nothing is left to do on host {', '.join(map(str, idle))}, and the others read the log before it was so; "
            "run the same command again on all hosts"
        )
    _met.append(link)
    return link


def _proof_in(root: Storage) -> Proof:
    """Create a file in the storage by which the other hosts know this one."""
    file, secret = f".probe-{uuid.uuid4().hex}-hosts", secrets.token_hex().encode()
    root.create(file, secret)

    def read(path: str) -> bytes | None:
        with suppress(FileMissing):
            return root.read(path)
        return None

    return Proof(file=file, secret=secret, storage=root.uri, read=read)


def _compare(link: HostLink, run: OpenedRun, values: Mapping[str, object]) -> str:
    """Compare the settings, code and storage of all hosts.

    Returns:
        The digest of what is the same.

    Raises:
        BatonError: they differ, or a host cannot tell; the same on all hosts.
    """
    if link.host != 0:
        asked = _answer(link)
        link.gather(_TOPIC, _said(run, values, asked), seconds=_SECONDS)
        return _answer(link).agreed
    try:
        head = run.log.head_seen()
        number = None if head is None else head.number
        digest = "" if number is None else _entry_digest(run, number)
        link.send(_TOPIC, _FromChief(head=number, digest=digest).to_json())
        mine = _OfHost(values=comparable(values))
        said = link.gather(_TOPIC, mine.to_json(), seconds=_SECONDS) or ()
        every = [_OfHost.model_validate_json(each) for each in said]
        _refuse(every)
    except AcceleratorLost:
        raise
    except BatonError as fault:
        refused = fault if isinstance(fault, InvalidInput) else refusal_of(0, fault)
        link.send(_TOPIC, _FromChief(error=ErrorReport.of(refused)).to_json())
        raise refused from fault
    agreed = hashlib.sha256(json.dumps(every[0].values, sort_keys=True).encode()).hexdigest()
    link.send(_TOPIC, _FromChief(agreed=agreed).to_json())
    return agreed


def _answer(link: HostLink) -> _FromChief:
    """What the chief says next.

    Raises:
        BatonError: it refuses.
    """
    said = _FromChief.model_validate_json(link.receive(_TOPIC, 0, seconds=_SECONDS))
    if said.error is not None:
        raise said.error.to_error()
    return said


def _entry_digest(run: OpenedRun, number: int) -> str:
    return hashlib.sha256(run.home.read(entry_path(number))).hexdigest()


def _said(run: OpenedRun, values: Mapping[str, object], asked: _FromChief) -> bytes:
    try:
        number = asked.head
        sees_head = number is None or _within(STORAGE_SECONDS, lambda: _entry_digest(run, number) == asked.digest)
        said = _OfHost(values=comparable(values), sees_head=sees_head)
    except BatonError as fault:
        said = _OfHost(error=ErrorReport.of(fault))
    return said.to_json()


def _within(seconds: float, sees: Callable[[], bool]) -> bool:
    until = time.monotonic() + seconds
    while True:
        with suppress(FileMissing):
            if sees():
                return True
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_SECONDS)


def _refuse(every: Sequence[_OfHost]) -> None:
    """Refuse hosts that differ, or could not tell.

    Args:
        every: what each host has said.
    """
    for host, said in enumerate(every):
        if said.error is not None:
            raise refusal_of(host, said.error.to_error())
    found = differences_between([said.values for said in every])
    if late := [host for host, said in enumerate(every) if not said.sees_head]:
        found += (f"newest entry of the log: host {', '.join(map(str, late))} cannot read that of host 0",)
    refuse_difference(found)


def _values(run: OpenedRun, goal: Goal, accept: Sequence[str]) -> dict[str, object]:
    """What must be the same on all hosts, as far as it is known before TensorFlow is imported."""
    head = run.log.head_seen()
    intra, inter = thread_counts(run.spec.accelerator, None if head is None else head.environment)
    return {
        **run.spec.model_dump(mode="json", exclude={"train": {"epoch_examples"}}),
        "storage": run.root.uri,
        "until_step": goal.until_step,
        "max_segments": goal.max_segments,
        "max_seconds": goal.max_seconds,
        "cut_at": goal.cuts,
        "accept": tuple(accept),
        **{f"code of {name}": source_digest(data) for name, data in collect_code(run.spec, run.folder).items()},
        # A run continues with the chief's threads, so the others begin with these too.
        "accelerator.intra_op_threads": intra,
        "accelerator.inter_op_threads": inter,
        # Two checkouts of Baton may have the same version.
        "code of Baton": _digest_of_files(Path(__file__).parents[1], ("flows", "tasks")),
        **{f"version of {name}": text for name, text in installed_versions().items()},
        **deciding_variables(os.environ),
    }


def _digest_of_files(folder: Path, packages: Sequence[str]) -> str:
    """The sha256 of the Python files of packages, 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for file in sorted(file for package in packages for file in (folder / package).rglob("*.py")):
        if file.parent == Path(__file__).parent / "package":
            continue  # stands elsewhere where Baton is installed from a wheel
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def require_same_keras(hosts: "Accelerator | OneHost") -> None:
    """Compare Keras's configuration, which is known once Keras is imported. Collective; the first of all.

    Raises:
        InvalidInput: the hosts differ; on every host.
    """
    if hosts.hosts > 1 and not isinstance(hosts, OneHost):
        keras = hosts.environment.keras
        hosts.require_same({"Keras": None if keras is None else keras.model_dump()})
