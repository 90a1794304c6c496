"""One way to read prepared examples: `input.py RUN_FILE MODE SECONDS`; MODE is prepare, ours, interleave, raw or seek.

ours         Baton's stream of shuffled batches
interleave   `interleave` over the shards and `shuffle(16000)`, with Baton's own parsing
raw          the records alone: not parsed, not shuffled
seek         seconds to the first batch at step 1,000,000, and at step 0
"""

import sys
import time
from pathlib import Path
from typing import Any

from baton.tasks.foundation.machine.environment import quiet_tensorflow

quiet_tensorflow()

import tensorflow as tf  # noqa: E402 - TensorFlow must be quiet before it is imported

from baton.tasks.foundation.contracts.run_file import load_run_file  # noqa: E402
from baton.tasks.foundation.contracts.stage_calls import PrepareDataCall  # noqa: E402
from baton.tasks.foundation.dataset.features import unflatten  # noqa: E402
from baton.tasks.foundation.dataset.manifest import load_manifest  # noqa: E402
from baton.tasks.foundation.dataset.read import training_dataset  # noqa: E402
from baton.tasks.foundation.dataset.shards import parse  # noqa: E402
from baton.tasks.foundation.stage import Place  # noqa: E402
from baton.tasks.foundation.storage.local import LocalStorage  # noqa: E402
from baton.tasks.foundation.telemetry.events import Silent  # noqa: E402
from baton.tasks.prepare_data.stage import prepare_data  # noqa: E402

_FAR = 1_000_000
_SHUFFLE = 16_000


def main() -> None:
    file, mode, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    run = load_run_file(file)
    spec = run.spec
    storage = LocalStorage(file.parent / "runs")
    place = Place.of(storage, spec.run, code_folder=run.folder, telemetry=Silent())
    ref = prepare_data(PrepareDataCall(spec=spec), place)  # does nothing the second time
    if mode == "prepare":
        return
    batch = spec.train.global_batch_size

    def ours(first_batch: int = 0) -> Any:
        return training_dataset(
            storage,
            ref,
            seed=0,
            global_batch_size=batch,
            window_shards=spec.data.window_shards,
            first_batch=first_batch,
        )

    if mode == "seek":
        _first_batch(ours())  # what is slow once
        near, far = _first_batch(ours()), _first_batch(ours(_FAR))
        _say("seek", far / near)
        _say("seek seconds", far)
        return
    manifest = load_manifest(storage, ref)
    files = [
        str(path) for path in sorted((file.parent / "runs" / ref.folder).rglob("*")) if "manifest" not in path.name
    ]

    def interleave() -> Any:
        shards = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files)).repeat()
        records = shards.interleave(tf.data.TFRecordDataset, cycle_length=8, num_parallel_calls=tf.data.AUTOTUNE)
        batches = records.shuffle(_SHUFFLE).batch(batch, drop_remainder=True)
        parsed = batches.map(lambda found: unflatten(parse(found, manifest.features)), tf.data.AUTOTUNE)
        return parsed.prefetch(tf.data.AUTOTUNE)

    def raw() -> Any:
        return tf.data.TFRecordDataset(files).repeat().batch(batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    _say("examples/s", _rate({"ours": ours, "interleave": interleave, "raw": raw}[mode](), batch, seconds))


def _rate(dataset: Any, batch: int, seconds: float) -> float:
    """Examples a second, after the first batches."""
    iterator = iter(dataset)
    for _ in range(10):
        next(iterator)
    began, batches = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        next(iterator)
        batches += 1
    return batch * batches / (time.perf_counter() - began)


def _first_batch(dataset: Any) -> float:
    began = time.perf_counter()
    next(iter(dataset))
    return time.perf_counter() - began


def _say(name: str, value: float) -> None:
    sys.stdout.write(f"value {name} = {value}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
