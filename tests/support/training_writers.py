"""Processes of `interleaving.py` that train on while their save is in flight, as the relay does.

Everything that decides what is committed is Baton's own: the thread that saves, the commit interval, the stage
checkpoint-to-GCS, the relay, and one `RunLog` a process, which remembers entries. Training
is a hash, and a checkpoint is one file: what it holds is a function of its parent and of the batches skipped.
"""

import hashlib
import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import greenlet
import pytest

from baton.flows import relay as relay_segments
from baton.flows.evaluating import is_in_flight
from baton.flows.relay import Relay
from baton.flows.result import Goal
from baton.flows.runner import InProcess
from baton.tasks.foundation.checkpoint import save
from baton.tasks.foundation.checkpoint.save import AsyncSaves
from baton.tasks.foundation.contracts.checkpoint import (
    CheckpointManifest,
    CheckpointRef,
    FileRecord,
    checkpoint_folder,
    manifest_digest,
)
from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.contracts.log_entry import Commit, Entry, Head, SegmentRequest, SegmentResult
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.contracts.stage_calls import TrainSegmentCall
from baton.tasks.foundation.errors import BlowUp, NonFinite
from baton.tasks.foundation.log.files import require_entry
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.machine.collectives import OneHost
from baton.tasks.foundation.stage import Place, Stage
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.transfers import checksum_bytes
from baton.tasks.foundation.telemetry.events import Silent
from baton.tasks.stages import TRAIN_SEGMENT
from baton.tasks.train_segment.interval import CommitInterval
from tests.support.interleaving import Thread
from tests.support.small_logs import staged_content


class SteppedThread:
    """As much of `threading.Thread` as `AsyncSaves` uses."""

    def __init__(self, *, target: Callable[[], object], name: str, daemon: bool) -> None:  # noqa: ARG002
        self._target = target

    def start(self) -> None:
        current = Thread.current()
        current.execution.start_thread(current.writer, self._target)


class SteppedQueue:
    """As much of `queue.SimpleQueue` as `AsyncSaves` uses, within one writer."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: deque[Thread] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        if self._waiting:
            waiting = self._waiting.popleft()
            waiting.execution.wake(waiting)

    def get(self, timeout: float | None = None) -> Any:  # noqa: ARG002 - time does not pass
        thread = Thread.current()
        while not self._items:
            if thread.execution.is_over:
                raise greenlet.GreenletExit
            self._waiting.append(thread)
            thread.wait()
        return self._items.popleft()


def step_saves(patch: pytest.MonkeyPatch) -> None:
    """Make every `AsyncSaves`'s thread a thread of its writer."""

    def refuse() -> NoReturn:
        raise OSError("not a thread of the system")

    patch.setattr(save, "threading", SimpleNamespace(Thread=SteppedThread, get_native_id=refuse))
    patch.setattr(save, "queue", SimpleNamespace(SimpleQueue=SteppedQueue, Empty=queue.Empty))


_SEGMENT_STEPS, _LOOP_STEPS = 10, 5
SPEC = RunSpec.model_validate(
    {
        "run": "scene",
        "storage": "unused",
        "data": {"source": "digits"},
        "model": {"build": "model.py:build_model"},
        "train": {"steps": 100, "segment_steps": _SEGMENT_STEPS, "global_batch_size": 8, "on_blowup": "rewind"},
        "checkpoint": {"keep_last": 2},
    }
)
_DATASET = DatasetRef(
    folder="datasets/d", content_digest="c", train_examples=8, validation_examples=0, already_prepared=True
)


# Attempts whose checkpoints the scene has staged.
_OF_SCENE = {"rival0", "rival1", "rival2"}


def after(content: bytes, *, step: int, skipped_batches: int) -> bytes:
    """What a checkpoint at `step` holds that was trained from one with `content`."""
    return hashlib.sha256(content + f"{step} {skipped_batches}".encode()).hexdigest().encode()


def content_of(home: Storage, ref: CheckpointRef) -> bytes:
    return home.read(f"{ref.path}/ckpt.data")


def _write(home: Storage, content: bytes, reference: CheckpointRef) -> CheckpointRef:
    """Stage a checkpoint in the order of `write_snapshot`: the base is there, the file, the manifest last."""
    require_entry(home, reference.base)
    folder = checkpoint_folder(step=reference.step, base=reference.base, attempt=reference.attempt)
    home.write(f"{folder}/ckpt.data", content)
    stored = checksum_bytes(content)
    manifest = CheckpointManifest(
        step=reference.step,
        base=reference.base,
        attempt=reference.attempt,
        replicas=1,
        state_digest=content.decode(),
        signature=(),
        leaf_digests={},
        files=(FileRecord(name="ckpt.data", size=stored.size, crc32c=stored.crc32c),),
    ).to_json()
    home.create(f"{folder}/manifest.json", manifest)
    digests = {"state_digest": content.decode(), "manifest_digest": manifest_digest(manifest), "size": stored.size}
    return reference.model_copy(update=digests)


class _FileInterval(CommitInterval):
    """Saves the content of a `_Trainer` while it trains on."""

    def __init__(self, request: SegmentRequest, place: Place, process: "Process") -> None:
        super().__init__(request, place)
        self._process = process

    def _saves_async(self, trainer: Any) -> bool:  # noqa: ARG002
        return True

    def _begin_save(self, saves: AsyncSaves, trainer: Any, reason: Any) -> SegmentResult:
        self._prepare_save(trainer)
        process, content, home = self._process, trainer.content, self.run_log.home
        reference = CheckpointRef.in_flight(step=trainer.step, base=self.base, attempt=process.attempt(trainer.step))

        def write() -> CheckpointRef:
            if reference.step == process.not_finite_at:
                process.not_finite_at = None
                raise NonFinite(f"step {reference.step} holds NaN", step=reference.step)
            return _write(home, content, reference)

        saves.begin(write)
        return self.result(reason, in_flight=reference)


class _Trainer:
    """As much of a trainer as the commit interval uses; its state is itself."""

    def __init__(self, content: bytes, step: int) -> None:
        self.content, self.step = content, step
        self.state, self.accelerator, self.traced = self, OneHost(), None
        self.cadence = SimpleNamespace(processed=None, is_auto=False, stalled=lambda _: None)

    def read_partial_row(self, _telemetry: object) -> None:
        """No row is partial."""


@dataclass
class Process:
    """A process that trains a run to a step. Each call of `work` is another process of the same name.

    Attributes:
        name: part of the ids of its attempts.
        until_step: the step to train to.
        commits_within: whether it also commits in the middle of each segment.
        not_finite_at: the step whose save finds once that weights are not finite.
        begun: the saves that it has begun.
    """

    name: str
    until_step: int = 50
    commits_within: bool = False
    not_finite_at: int | None = None
    begun: list[str] = field(default_factory=list)
    _held: tuple[str, bytes] = ("", b"")

    def attempt(self, step: int) -> str:
        """The id of the save of a step."""
        self.begun.append(f"{self.name}{step}")
        return self.begun[-1]

    def work(self, store: Any) -> Head:
        """Train from the head of the log to the end, each segment beside the save of the one before."""
        log = RunLog(store)
        with AsyncSaves() as saves:
            place = Place(
                root=store, home=store, log=log, code_folder=Path(), telemetry=Silent(), clock=lambda: 0.0,
                saves=saves,
            )  # fmt: skip
            goal = Goal.of(SPEC, until_step=self.until_step)
            admitted: Any = SimpleNamespace(goal=goal, accept=())
            unused: Any = None
            relay = Relay(
                spec=SPEC, runner=_Runner(self), place=place, hosts=OneHost(), admitted=admitted, dataset=_DATASET,
                ledger=unused, curves=unused, track=unused, clock=lambda: 0.0, began=0.0, is_new=False,
            )  # fmt: skip
            head = log.require_head()
            while True:
                if goal.reached(head, SPEC):
                    if not is_in_flight(head):
                        return head
                    head = relay.wait_for_save(head)
                    continue
                _, head, _ = relay.train_and_commit(head, number=1)

    def train(self, request: SegmentRequest, place: Place) -> SegmentResult:
        """The stage train-segment, with its order of operations."""
        interval = _FileInterval(request, place, self)
        hosts = OneHost()
        try:
            if self._held[0] != request.start.path:
                interval.wait_for_save(hosts)
                self._held = interval.start.path, content_of(place.home, interval.start)
            trainer = _Trainer(self._held[1], request.start.step)
            while trainer.step < request.until_step:
                place.home.trains()  # type: ignore[attr-defined]
                if place.saves is not None and place.saves.failed:
                    interval.raise_failed_save(hosts)
                if self.commits_within and trainer.step > interval.start.step:
                    interval.commit(trainer, "interval")  # type: ignore[arg-type]
                trainer.step += _LOOP_STEPS
                trainer.content = after(trainer.content, step=trainer.step, skipped_batches=request.skipped_batches)
            result = interval.end(trainer, "segment_end")  # type: ignore[arg-type]
        except BlowUp as found:
            return interval.rewind(interval.earliest(found, hosts), hosts)  # type: ignore[arg-type]
        if result.in_flight is None:
            raise AssertionError("the save is not in flight")
        self._held = result.in_flight.path, trainer.content
        return result


class _Runner(InProcess):
    """Runs every stage but train-segment in this process."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def run(self, stage: Stage[Any, Any], call: Any, place: Place) -> Any:
        if stage.name == TRAIN_SEGMENT.name:
            if not isinstance(call, TrainSegmentCall):
                raise AssertionError(call)
            return self._process.train(call.request, place)
        return super().run(stage, call, place)


def step_processes(patch: pytest.MonkeyPatch) -> None:
    """Put the threads of `Process` under the control of an `Execution`."""
    step_saves(patch)
    # Signals do not arrive here, and its thread is one of the system.
    stops = SimpleNamespace(requested=None)
    patch.setattr(relay_segments, "run_uninterrupted", lambda work, *_, **__: work(stops))


def assert_same_bits(entries: list[Entry], *, since: int) -> None:
    """Assert that every commit was trained from the tip of its time, once, and holds what its parent determines.

    Args:
        entries: of the log.
        since: number of the entry that the processes started from.
    """
    contents: dict[str, bytes] = {}
    for before, entry in zip(entries[since:], entries[since + 1 :], strict=False):
        if not isinstance(entry.body, Commit):
            continue
        tip, made = before.head.tip, entry.body.checkpoint
        assert tip is not None
        assert entry.body.parent == tip.path, "committed on top of what is not the tip"
        assert made.step > tip.step, "a step was trained twice"
        if made.attempt in _OF_SCENE:
            continue
        content = contents.get(tip.path) or staged_content(tip.step, tip.attempt)
        for step in range(tip.step, made.step, _LOOP_STEPS):
            content = after(content, step=step + _LOOP_STEPS, skipped_batches=before.head.skipped_batches)
        assert made.state_digest == content.decode(), f"step {made.step} holds another state"
        contents[made.path] = content
