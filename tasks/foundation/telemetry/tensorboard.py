"""TensorBoard event files in the run's home, made from its log: `tensorboard/train` and `tensorboard/validation`.

There is one event file for each commit that leads to the tip and one for each evaluation. The entry's number is in the
file name, so that names sort like the log. Files of commits that a rewind or a quarantine abandoned are deleted. Each
file begins with a session start at its first step, which makes TensorBoard drop what it has read from that step on. So
TensorBoard shows one curve without repeats. Nothing depends on these files; missing ones are written next time.
"""

import logging
import math
import re
import struct
from collections.abc import Iterator, Mapping
from datetime import datetime

from tasks.foundation.contracts.checkpoint import step_in_folder_name
from tasks.foundation.contracts.log_entry import Commit, Entry, Evaluation, Head
from tasks.foundation.errors import BatonError, FileAlreadyThere
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.checksum import masked_crc32c

_LOGGER = logging.getLogger(__name__)
_TRAIN, _VALIDATION = "tensorboard/train", "tensorboard/validation"
# TensorBoard recognizes event files by `tfevents` in their names.
_NAME = re.compile(r"events\.out\.tfevents\.(\d{10})\.step-\d+")
# Field numbers of TensorFlow's Event, Summary and SessionLog messages, and wire types of protocol buffers.
_WALL_TIME, _STEP, _VERSION, _SUMMARY, _SESSION = 1, 2, 3, 5, 7
_VALUE, _TAG, _SIMPLE_VALUE, _STATUS, _START = 1, 1, 2, 1, 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def write_curves(log: RunLog) -> None:
    """Bring the event files up to date with the log. A store that refuses or fails causes a warning, not an error."""
    try:
        _write_curves(log)
    except BatonError as fault:
        _LOGGER.warning("could not write the TensorBoard files; trying again after the next commit: %s", fault)


def _write_curves(log: RunLog) -> None:
    head = log.head()
    if head is None:
        return
    present = {path for folder in (_TRAIN, _VALIDATION) for path in log.home.files(folder) if _number(path) is not None}
    files: list[tuple[str, bytes]] = []
    known = 0
    for path, data in _newest_first(log, head):
        if path in present and path.startswith(_TRAIN):
            # Older files were written, and abandoned ones deleted, before this one.
            known = _number(path) or 0
            break
        files.append((path, data))
    wanted = {path for path, _ in files}
    for path in sorted(present - wanted):
        if (_number(path) or 0) > known:
            log.home.delete(path)
    for path, data in sorted(files, key=lambda file: _number(file[0]) or 0):
        if path not in present:
            try:
                log.home.create(path, data)
            except FileAlreadyThere:
                continue  # another process wrote the same bytes


def _newest_first(log: RunLog, head: Head) -> Iterator[tuple[str, bytes]]:
    """Event files of the commits that lead to the tip and of their evaluations."""
    path = None if head.tip is None else head.tip.path
    waiting: dict[str, list[Entry]] = {}
    for number in range(head.number, -1, -1):
        entry = log.entry(number)
        match entry.body:
            case Evaluation(checkpoint=checkpoint):
                waiting.setdefault(checkpoint.path, []).append(entry)
            case Commit(checkpoint=checkpoint, parent=parent) if checkpoint.path == path:
                for evaluated in waiting.pop(path, []):
                    yield _evaluation_file(evaluated)
                path = parent
                if entry.body.history:
                    yield _commit_file(entry, entry.body)


def _commit_file(entry: Entry, body: Commit) -> tuple[str, bytes]:
    time = _seconds(entry)
    rows = b"".join(_scalars(time, row.step, row.metrics) for row in body.history)
    # The step after the parent's: before a rewind, any later step may have had a row.
    begin = 1 if body.parent is None else step_in_folder_name(body.parent) + 1
    return _path(_TRAIN, entry, begin), _beginning(time, begin) + rows


def _evaluation_file(entry: Entry) -> tuple[str, bytes]:
    if not isinstance(entry.body, Evaluation):
        raise TypeError(f"entry {entry.number} is a {entry.body.kind}, not an evaluation")
    time, step = _seconds(entry), entry.body.checkpoint.step
    return _path(_VALIDATION, entry, step), _beginning(time, step) + _scalars(time, step, entry.body.metrics)


def _path(folder: str, entry: Entry, step: int) -> str:
    return f"{folder}/events.out.tfevents.{entry.number:010d}.step-{step}"


def _number(path: str) -> int | None:
    """Number of the entry that a file was made from; None for a file that Baton did not write."""
    match = _NAME.fullmatch(path.rsplit("/", 1)[-1])
    return None if match is None else int(match[1])


def _seconds(entry: Entry) -> float:
    """POSIX timestamp of an entry; 0 if its time cannot be read."""
    try:
        return datetime.fromisoformat(entry.time).timestamp()
    except (ValueError, OverflowError):
        return 0.0


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
