"""Steps per second of Baton's loop over those of `model.fit`, on the digits model.

`python -m tests.benchmarks.loop_against_fit`

Both run the same model on the same data in one process, in turns. It prints the ratio of each pair.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tasks.foundation.accelerator.environment import quiet_tensorflow
from tasks.foundation.contracts.stage_calls import PrepareDataCall
from tasks.foundation.stage import Place

quiet_tensorflow()

import tensorflow as tf  # noqa: E402 - TensorFlow must be quiet before it is imported

from tasks.foundation.accelerator.strategy import acquire  # noqa: E402
from tasks.foundation.contracts.run_file import load_run_file  # noqa: E402
from tasks.foundation.dataset.reader import load_manifest, training_dataset, zero_batch  # noqa: E402
from tasks.foundation.state.train_state import build_train_state  # noqa: E402
from tasks.foundation.storage.local import LocalStorage  # noqa: E402
from tasks.foundation.telemetry.events import Silent  # noqa: E402
from tasks.prepare_data.stage import prepare_data  # noqa: E402
from tasks.train_segment.loop import make_loop  # noqa: E402
from tests.support.checkout import CHECKOUT  # noqa: E402

STEPS = 400
PAIRS = 5


def main() -> None:
    checkout = CHECKOUT
    run = load_run_file(checkout / "deploy" / "runs" / "digits" / "run.yaml")
    spec = run.spec
    with tempfile.TemporaryDirectory() as folder:
        storage = LocalStorage(Path(folder))
        dataset = prepare_data(
            PrepareDataCall(spec=spec),
            Place.of(storage, spec.run, code_folder=run.folder, telemetry=Silent()),
        )
        accelerator = acquire(spec.accelerator, None)
        batch = zero_batch(load_manifest(storage, dataset), spec.train.global_batch_size)
        state = build_train_state(spec, code_folder=run.folder, accelerator=accelerator, batch=batch)
        batches = training_dataset(
            storage,
            dataset,
            seed=0,
            global_batch_size=spec.train.global_batch_size,
            window_shards=spec.data.window_shards,
            first_batch=0,
        )
        loop = make_loop(state.model.train_step, accelerator)
        iterator = iter(accelerator.strategy.distribute_datasets_from_function(lambda _: batches))

        def own() -> None:
            loop(iterator, tf.constant(STEPS, tf.int64))[0].numpy()

        def fit() -> None:
            state.model.fit(batches, steps_per_epoch=STEPS, epochs=1, verbose=0)

        own(), fit()  # trace both
        ratios = [_seconds(fit) / _seconds(own) for _ in range(PAIRS)]
    low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
    sys.stdout.write(f"own loop over fit, steps per second: {low:.2f} {middle:.2f} {high:.2f} (min, median, max)\n")


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
