"""TensorBoard event files in the run's home, made from its log: `tensorboard/train` and `tensorboard/validation`.

There is one event file for each commit that leads to the tip and one for each evaluation. The entry's number is in the
file name, so that names sort like the log. Files of commits that a rewind or a quarantine abandoned are deleted. Each
file begins with a session start at its first step, which makes TensorBoard drop what it has read from that step on. So
TensorBoard shows one curve without repeats. Nothing depends on these files; missing ones are written next time.
"""

import math
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress

from baton.tasks.foundation.contracts.checkpoint import step_in_folder_name
from baton.tasks.foundation.contracts.log_entry import Commit, Entry, Evaluation, Head
from baton.tasks.foundation.errors import FileAlreadyThere
from baton.tasks.foundation.log.history import posix_seconds
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import best_effort
from baton.tasks.foundation.storage.transfers import masked_crc32c


def training_curves(entry: Entry, body: Commit) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield step and values by name: metrics, learning rate, epochs that are done, and at its end the commit's speed.

    Args:
        entry: the entry of the commit.
    """
    epoch = None if entry.totals is None else entry.totals.epoch
    for row in body.history:
        yield (
            row.step,
            {
                **row.metrics,
                **({} if row.learning_rate is None else {"learning_rate": row.learning_rate}),
                **({} if epoch is None else {"epoch": epoch.after(row.step)}),
            },
        )
    seconds = body.seconds.get("train", 0.0)
    if body.history and body.examples and seconds > 0:
        yield body.checkpoint.step, {"examples_per_second": body.examples / seconds}


_TRAIN, _VALIDATION = "tensorboard/train", "tensorboard/validation"
_STORE_SECONDS = 30.0  # the next save waits for the files
# TensorBoard recognizes event files by `tfevents` in their names.
_NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\.step-\d+")
# Field numbers of TensorFlow's Event, Summary and SessionLog messages, and wire types of protocol buffers.
_WALL_TIME, _STEP, _VERSION, _SUMMARY, _SESSION = 1, 2, 3, 5, 7
_VALUE, _TAG, _SIMPLE_VALUE, _STATUS, _START = 1, 1, 2, 1, 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class CurveFiles:
    """Keeps the event files of one run up to date. Not thread-safe.

    After the first update, an update looks at the new entries only: its cost does not grow with the log.
    """

    def __init__(self, log: RunLog) -> None:
        """Read nothing yet."""
        self._log = log
        self._home = log.home.with_deadline(_STORE_SECONDS)
        self._done: Head | None = None  # the state that the files show

    def update(self, head: Head | None = None) -> None:
        """Bring the files up to date. A store that refuses or fails causes a warning, not an error.

        Args:
            head: the newest state, if the caller knows it; None: it is read from the log.
        """
        problem = "the TensorBoard files could not be written"
        with best_effort(self._home, problem, then="it is tried again after the next commit"):
            head = self._log.head() if head is None else head
            if head is not None:
                self._update(head)
                self._done = head

    def _update(self, head: Head) -> None:
        files, abandoned = self._changes(head)
        # Deleted first and written in the order of the log: whatever is older than a present file is as it should be.
        for path in abandoned:
            self._home.delete(path)
        for path, data in sorted(files, key=lambda file: _number(file[0]) or 0):
            with suppress(FileAlreadyThere):  # another process wrote the same bytes
                self._home.create(path, data)

    def _changes(self, head: Head) -> tuple[list[tuple[str, bytes]], list[str]]:
        """Files to write and paths of abandoned files; reads back to what is known to be in place."""
        known, shown = (-1, None) if self._done is None else (self._done.number, _tip_path(self._done))
        path, in_place = _tip_path(head), False
        files: list[tuple[str, bytes]] = []
        abandoned: list[str] = []
        waiting: dict[str, list[Entry]] = {}  # evaluations whose commits are further back
        for number in range(head.number, -1, -1):
            if number <= known and path == shown:
                in_place = True
                files += [_evaluation_file(each) for each in waiting.pop(path or "", ())]
            if in_place and not waiting:
                break
            entry = self._log.entry(number)
            match entry.body:
                case Evaluation(checkpoint=checkpoint) if not in_place:
                    waiting.setdefault(checkpoint.path, []).append(entry)
                case Commit(checkpoint=checkpoint, parent=parent) if checkpoint.path == path:
                    path = parent
                    files += [_evaluation_file(each) for each in waiting.pop(checkpoint.path, ())]
                    if not in_place and entry.body.history:
                        is_new = self._done is not None and number > known
                        in_place = not is_new and self._home.exists(_commit_path(entry, entry.body))
                        files += [] if in_place else [_commit_file(entry, entry.body)]
                case Commit(checkpoint=checkpoint):
                    abandoned += [_evaluation_path(each) for each in waiting.pop(checkpoint.path, ())]
                    abandoned += [] if in_place else [_commit_path(entry, entry.body)]
        return files, abandoned


def write_curves(log: RunLog) -> None:
    """Bring the event files of a run up to date with its log, once."""
    CurveFiles(log).update()


def _tip_path(head: Head) -> str | None:
    return None if head.tip is None else head.tip.path


def _commit_file(entry: Entry, body: Commit) -> tuple[str, bytes]:
    time = posix_seconds(entry)
    rows = b"".join(_scalars(time, step, values) for step, values in training_curves(entry, body))
    return _commit_path(entry, body), _beginning(time, _first_step(body)) + rows


def _first_step(body: Commit) -> int:
    """The step after the parent's: before a rewind, any later step may have had a row."""
    return 1 if body.parent is None else step_in_folder_name(body.parent) + 1


def _evaluation_file(entry: Entry) -> tuple[str, bytes]:
    body = _evaluation_of(entry)
    time, step = posix_seconds(entry), body.checkpoint.step
    return _evaluation_path(entry), _beginning(time, step) + _scalars(time, step, body.metrics)


def _evaluation_of(entry: Entry) -> Evaluation:
    if not isinstance(entry.body, Evaluation):
        raise TypeError(f"entry {entry.number} is a {entry.body.kind}, not an evaluation")
    return entry.body


def _commit_path(entry: Entry, body: Commit) -> str:
    return _path(_TRAIN, entry, _first_step(body))


def _evaluation_path(entry: Entry) -> str:
    return _path(_VALIDATION, entry, _evaluation_of(entry).checkpoint.step)


def _path(folder: str, entry: Entry, step: int) -> str:
    return f"{folder}/events.out.tfevents.{entry.number:010d}.step-{step}"


def _number(path: str) -> int | None:
    """Number of the entry that a file was made from; None for a file that Baton did not write."""
    match = _NAME.fullmatch(path.rsplit("/", 1)[-1])
    return None if match is None else int(match[1])


def _beginning(time: float, step: int) -> bytes:
    start = _field(_SESSION, _BYTES, _field(_STATUS, _VARINT, _varint(_START)))
    return _record(_event(time, 0, _field(_VERSION, _BYTES, b"brain.Event:2"))) + _record(_event(time, step, start))


def _scalars(time: float, step: int, metrics: Mapping[str, float]) -> bytes:
    values = b"".join(
        _field(
            _VALUE,
            _BYTES,
            _field(_TAG, _BYTES, name.encode()) + _field(_SIMPLE_VALUE, _FIXED32, _float32(value)),
        )
        for name, value in metrics.items()
    )
    return _record(_event(time, step, _field(_SUMMARY, _BYTES, values)))


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


def _event(time: float, step: int, what: bytes) -> bytes:
    return _field(_WALL_TIME, _FIXED64, struct.pack("<d", time)) + _field(_STEP, _VARINT, _varint(step)) + what


def _field(number: int, kind: int, data: bytes) -> bytes:
    """A field of a protocol buffer message: https://protobuf.dev/programming-guides/encoding."""
    return _varint(number << 3 | kind) + (_varint(len(data)) if kind == _BYTES else b"") + data


def _varint(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:  # noqa: PLR2004 - seven bits per byte
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def _record(data: bytes) -> bytes:
    """A TFRecord: length, checksum of the length, data, checksum of the data."""
    length = struct.pack("<Q", len(data))
    checksums = (struct.pack("<I", masked_crc32c(part)) for part in (length, data))
    return length + next(checksums) + data + next(checksums)
