"""One way to read augmented examples: `transforms.py RUN_FILE MODE SECONDS`; MODE is one of these.
 Its data is one
source, or a mixture.

prepare      prepares the dataset
ours         Baton's stream, with `data.transform`
in memory    `from_tensor_slices`, `shuffle(16000)` and the same `map` in plain tf.data
records      the same over Baton's records, with `interleave`
seek         seconds to the first batch at step 1,000,000, over those at step 0
"""

import sys
import time
from pathlib import Path
from typing import Any

from baton.tasks.foundation.machine.environment import quiet_tensorflow

quiet_tensorflow()

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402 - TensorFlow must be quiet before it is imported

from baton.tasks.foundation.contracts.run_file import load_run_file  # noqa: E402
from baton.tasks.foundation.contracts.stage_calls import PrepareDataCall  # noqa: E402
from baton.tasks.foundation.dataset.features import unflatten  # noqa: E402
from baton.tasks.foundation.dataset.manifest import load_manifest  # noqa: E402
from baton.tasks.foundation.dataset.model_inputs import model_inputs  # noqa: E402
from baton.tasks.foundation.dataset.read import training_dataset  # noqa: E402
from baton.tasks.foundation.dataset.shards import parse  # noqa: E402
from baton.tasks.foundation.stage import Place  # noqa: E402
from baton.tasks.foundation.storage.local import LocalStorage  # noqa: E402
from baton.tasks.foundation.telemetry.events import Silent  # noqa: E402
from baton.tasks.foundation.user_functions import load_function  # noqa: E402
from baton.tasks.prepare_data.stage import prepare_data  # noqa: E402

_FAR = 1_000_000
_SHUFFLE = 16_000
_SEEKS = 5


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
    manifest = load_manifest(storage, ref)
    functions = model_inputs(spec, manifest.features, run.folder).training_functions
    augment = load_function(spec.data.transforms[0], run.folder)

    def ours(first_batch: int = 0) -> Any:
        return training_dataset(
            storage,
            ref,
            seed=0,
            global_batch_size=batch,
            window_shards=spec.data.window_shards,
            first_batch=first_batch,
            functions=functions,
        )

    def mapped(examples: Any) -> Any:
        """The same function, with a seed from a counter."""
        numbered = tf.data.Dataset.zip(examples, tf.data.Dataset.counter())
        work = numbered.map(lambda example, number: augment(example, seed=[0, number]), tf.data.AUTOTUNE)
        return work.batch(batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    def in_memory() -> Any:
        arrays = np.load(spec.data.options["path"])
        examples = tf.data.Dataset.from_tensor_slices((arrays["x"], arrays["y"]))
        return mapped(examples.shuffle(_SHUFFLE).repeat())

    def records() -> Any:
        folder = file.parent / "runs" / ref.folder
        files = [str(path) for path in sorted(folder.rglob("*")) if "manifest" not in path.name]
        shards = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files)).repeat()
        found = shards.interleave(tf.data.TFRecordDataset, cycle_length=8, num_parallel_calls=tf.data.AUTOTUNE)
        batches = found.shuffle(_SHUFFLE).batch(batch)
        parsed = batches.map(lambda some: unflatten(parse(some, manifest.features)), tf.data.AUTOTUNE)
        return mapped(parsed.unbatch())

    if mode == "seek":
        _first_batch(ours())  # what is slow once
        pairs = [(_first_batch(ours(_FAR)), _first_batch(ours())) for _ in range(_SEEKS)]
        for far, near in pairs:
            _say("seek", far / near)
            _say("seek seconds", far)
        return
    _say("examples/s", _rate({"ours": ours, "in memory": in_memory, "records": records}[mode](), batch, seconds))


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
