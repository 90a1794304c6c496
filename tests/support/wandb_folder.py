"""What is in an offline folder of Weights & Biases."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

_BLOCK, _HEADER = 32 * 1024, 7


def records(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, which W&B writes."""
    at, whole = _HEADER, b""  # W&B's own header comes first
    while at + _HEADER <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        whole += data[at + _HEADER : at + _HEADER + size]
        at += _HEADER + size
        if kind in (1, 4):  # full, last
            yield whole
            whole = b""


def in_folder(home: Path) -> tuple[str, list[tuple[str, int, float]]]:
    """Id and points of the only offline run."""
    from wandb.proto import wandb_internal_pb2 as protocol

    [file] = home.glob("wandb/offline-run-*/run-*.wandb")
    points, run = [], ""
    for data in records(file.read_bytes()):
        record = protocol.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            run = record.run.run_id
        for_row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for name, value in for_row.items():
            if name.split("/")[0] in {"train", "validation", "test"}:
                points.append((name, for_row["step"], value))
    return run, sorted(points)
