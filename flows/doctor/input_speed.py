"""Batches of the sample: one for a step, and how fast they come."""

import time
from typing import Any

from flows.doctor.data_sample import Sample
from flows.doctor.finding import Finding
from flows.doctor.run_file_checks import Target, examples_each
from tasks.foundation.contracts.run_file import RunFile

# Whichever comes first.
_MEASURED_SECONDS = 2.0
_MEASURED_BATCHES = 2000


def feeds_fast_enough(run: RunFile, target: Target, sample: Sample, step_seconds: float | None) -> Finding:
    """Examples a second that the input pipeline gives on this machine, against what steps of `step_seconds` take.

    Args:
        run: the run file.
        target: what it is to train on.
        sample: is read again and again for about two seconds.
        step_seconds: how long a step is assumed to last; None: not known.
    """
    from tasks.foundation.dataset.reading_errors import reading_failures

    replicas = max(1, target.replicas // target.hosts)
    each = examples_each(run, target)
    with reading_failures():
        batches = iter(_batches(run, sample, each=each, replicas=replicas))
        next(batches)  # opens the files
        count, began = 0, time.monotonic()
        while time.monotonic() - began < _MEASURED_SECONDS and count < _MEASURED_BATCHES:
            next(batches)
            count += 1
        rate = count * each / max(time.monotonic() - began, 1e-9)
    per_host = each * replicas
    own = "the prepared dataset" if sample.is_whole else "the sample, from this machine's disk"
    text = f"{rate:,.0f} examples/s a host with this machine's CPUs, from {own}"
    if step_seconds is None:
        text += f"; it keeps up with steps of {1000 * per_host / rate:.3g} ms or more"
        remedy = "say how long a step may take, --step-seconds 0.05, to have it checked"
        return Finding(check="input", verdict="pass", text=text, remedy=remedy)
    needed = per_host / step_seconds
    text += f"; steps of {1000 * step_seconds:.3g} ms take {needed:,.0f}"
    if rate >= needed:
        return Finding(check="input", verdict="pass", text=text)
    return Finding(
        check="input",
        verdict="warn",
        text=f"{text}: the accelerator would wait {1 - rate / needed:.0%} of the time",
        remedy="have fewer bytes or less decoding an example (prepare images at their final size, as numbers), a "
        "larger step, or a host with more CPUs than this machine",
    )


def first_batch(run: RunFile, sample: Sample, *, each: int) -> tuple[Any, ...]:
    """The sample's first batch for one replica, as tensors."""
    from tasks.foundation.dataset.class_weight import weighed
    from tasks.foundation.dataset.reading_errors import reading_failures

    with reading_failures():
        return weighed(next(iter(_batches(run, sample, each=each, replicas=1))), run.spec.train.class_weight)


def _batches(run: RunFile, sample: Sample, *, each: int, replicas: int) -> Any:
    from tasks.foundation.dataset.reader import training_dataset

    return training_dataset(
        sample.storage,
        sample.ref,
        seed=run.spec.train.seed,
        global_batch_size=each * replicas,
        window_shards=run.spec.data.window_shards,
        first_batch=0,
        local_replicas=replicas,
    )
