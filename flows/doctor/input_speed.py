"""Reads batches of the data sample: one for a training step, and many for measuring the input pipeline."""

import time
from typing import TYPE_CHECKING, Any

from flows.doctor.data_sample import DataSample
from flows.doctor.finding import Finding
from flows.doctor.run_file_checks import Target, examples_per_replica
from tasks.foundation.contracts.run_file import RunFile

if TYPE_CHECKING:
    import tensorflow as tf

# The measurement ends at the first of these limits.
_MEASURED_SECONDS = 2.0
_MEASURED_BATCHES = 2000


def check_input(run: RunFile, target: Target, sample: DataSample, step_seconds: float | None) -> Finding:
    """Measure the examples per second of the input pipeline on this machine, and compare them with the step time.

    Args:
        run: the run file.
        target: the accelerator to train on.
        sample: read repeatedly for about two seconds.
        step_seconds: assumed duration of one step; None if unknown.
    """
    from tasks.foundation.dataset.reading_errors import original_read_errors

    replicas = max(1, target.replicas // target.hosts)
    per_replica = examples_per_replica(run, target)
    with original_read_errors():
        batches = iter(_batches(run, sample, per_replica=per_replica, replicas=replicas))
        next(batches)  # opens the files
        count, began = 0, time.monotonic()
        while time.monotonic() - began < _MEASURED_SECONDS and count < _MEASURED_BATCHES:
            next(batches)
            count += 1
        rate = count * per_replica / max(time.monotonic() - began, 1e-9)
    per_host = per_replica * replicas
    data = "the prepared dataset" if sample.is_whole else "the sample on this machine's disk"
    text = f"{rate:,.0f} examples/s per host with this machine's CPUs, reading {data}"
    if step_seconds is None:
        text += f"; fast enough for steps of {1000 * per_host / rate:.3g} ms or longer"
        remedy = "give the expected step time to check it, such as --step-seconds 0.05"
        return Finding(check="input", verdict="pass", text=text, remedy=remedy)
    needed = per_host / step_seconds
    text += f"; steps of {1000 * step_seconds:.3g} ms need {needed:,.0f}"
    if rate >= needed:
        return Finding(check="input", verdict="pass", text=text)
    return Finding(
        check="input",
        verdict="warn",
        text=f"{text}: the accelerator would wait for input {1 - rate / needed:.0%} of the time",
        remedy="make examples smaller or cheaper to decode (store images as arrays at their final size), make the "
        "step larger, or use a host with more CPUs than this machine",
    )


def first_batch(run: RunFile, sample: DataSample, *, per_replica: int) -> tuple[Any, ...]:
    """Return the sample's first batch as tensors.

    Args:
        run: the run file.
        sample: the sample to read.
        per_replica: number of examples in the batch.
    """
    from tasks.foundation.dataset.class_weight import apply_class_weight
    from tasks.foundation.dataset.reading_errors import original_read_errors

    with original_read_errors():
        batch = next(iter(_batches(run, sample, per_replica=per_replica, replicas=1)))
        return apply_class_weight(batch, run.spec.train.class_weight)


def _batches(run: RunFile, sample: DataSample, *, per_replica: int, replicas: int) -> "tf.data.Dataset":
    from tasks.foundation.dataset.reader import training_dataset
    from tasks.foundation.transforms.model_inputs import model_inputs

    inputs = model_inputs(run.spec, sample.manifest.features, run.folder)
    return training_dataset(
        sample.storage,
        sample.ref,
        seed=run.spec.train.seed,
        global_batch_size=per_replica * replicas,
        window_shards=run.spec.data.window_shards,
        first_batch=0,
        shuffle=run.spec.data.shuffle,
        local_replicas=replicas,
        functions=inputs.training_functions,
    )
