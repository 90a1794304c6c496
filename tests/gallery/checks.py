"""What each example of the gallery must show, measured in two processes: one with one replica, one with two.

A process takes several examples one after the other, because a process's first traces are slow.
"""

import contextlib
import importlib
import importlib.util
import inspect
import itertools
import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.contracts.run_spec import RunSpec, with_examples
from tests.support.lab import Lab, differing, in_fresh_process, keep_trainer, rows_of

GALLERY = Path(__file__).parent
# The step at which the run is cut and handed over to two replicas, and its last step.
CUT, STEPS = 7, 21
_IN_A_PROCESS = 6
_OF_THE_MODEL = ("model/", "variables/", "seeds/", "generators/")
# They draw without seeds, as many public examples do; `fit` then draws other numbers, so losses are not compared.
UNSEEDED = frozenset({"dcgan", "ddim", "ddpm", "swin"})
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"


def examples() -> list[str]:
    """The names of all examples."""
    return sorted(file.parent.name for file in GALLERY.glob("*/run.yaml"))


def chunks(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Examples that share a process."""
    return [tuple(names[first : first + _IN_A_PROCESS]) for first in range(0, len(names), _IN_A_PROCESS)]


def run_checks(folder: Path, names: Sequence[str], *, log_every: int) -> dict[str, dict[str, Any]]:
    """Check examples in two processes.

    Args:
        folder: for the runs.
        names: of the examples.
        log_every: steps between the rows of the cut run. More than 1: the cut is in the middle of a row, so that the
            checkpoint has sums of metrics; the step is then traced once more, for rows of each step.

    Returns:
        By name: what `_one_replica` and `_two_replicas` return, or "error", the traceback of what was raised; and
        "seconds", of the processors.
    """
    found = {name: {} for name in names}
    for check in (on_one_replica, on_two_replicas):
        going_on = [name for name in names if "error" not in found[name]]
        for name, result in in_fresh_process(check, folder=str(folder), names=going_on, log_every=log_every).items():
            found[name] |= result | {"seconds": found[name].get("seconds", 0.0) + result["seconds"]}
    return found


def on_one_replica(folder: str, names: list[str], log_every: int) -> dict[str, dict[str, Any]]:
    """Train each example straight, cut, and with `fit`."""
    return _of_each(_one_replica, folder, names, log_every)


def on_two_replicas(folder: str, names: list[str], log_every: int) -> dict[str, dict[str, Any]]:
    """Continue each example, which one replica has trained to CUT, on two replicas."""
    return _of_each(_two_replicas, folder, names, log_every)


def _of_each(
    check: Callable[[Lab, str, int], dict[str, Any]], folder: str, names: list[str], log_every: int
) -> dict[str, dict[str, Any]]:
    from baton.tasks.foundation.state.warm_state import PROCESS_STATE
    from baton.tasks.init_or_restore import model_requirements

    # This check traces each step once more, for an error message that no example needs.
    model_requirements.require_train_step = lambda *_model, **_settings: None
    results = {}
    for name in names:
        begun = time.process_time()
        try:
            results[name] = check(Lab(Path(folder), GALLERY / name), name, log_every)
        except Exception:  # noqa: BLE001 - one example must not hide the others; a test fails with this text
            results[name] = {"error": traceback.format_exc()}
        keep_trainer()
        PROCESS_STATE.forget()
        results[name]["seconds"] = time.process_time() - begun
    return results


def _spec(lab: Lab, name: str, *, log_every: int, replicas: int = 1) -> RunSpec:
    settings = [f"train.log_every_steps={log_every}", "accelerator.kind=cpu", f"accelerator.replicas={replicas}"]
    from baton.tasks.foundation.machine.devices import acquire

    spec = load_run_file(GALLERY / name / "run.yaml", settings).spec
    acquire(spec.accelerator, None)  # before data.py, as a run does: a tf.data.Dataset starts TensorFlow
    return with_examples(spec, lab.prepare(spec).train_examples)


def _one_replica(lab: Lab, name: str, log_every: int) -> dict[str, Any]:
    """Train straight, cut, with a row for each step, and with `fit`.

    Returns:
        "differing": keys of the checkpoint that differ between straight and cut. "digests": of both. "rows": of both.
        "losses": metrics of each step. "fit": the same of `fit`, none for UNSEEDED. "weights": their number.
    """
    from baton.tasks.checkpoint_to_gcs.stage import checkpoint_to_gcs
    from baton.tasks.foundation.contracts.stage_calls import CheckpointToGcsCall
    from baton.tasks.foundation.state.warm_state import PROCESS_STATE

    spec = _spec(lab, name, log_every=log_every)
    start = lab.begin(spec).tip
    assert start is not None
    straight = lab.train(spec, start, STEPS)
    first = lab.train(spec, start, CUT)
    keep_trainer()
    PROCESS_STATE.forget()
    assert first.staged is not None
    second = lab.train(spec, first.staged, STEPS)
    keep_trainer()
    PROCESS_STATE.forget()
    ends = [straight.staged, second.staged]
    assert None not in ends
    tensors = [lab.tensors(spec, end) for end in ends if end is not None]
    compared = name not in UNSEEDED
    of_steps = lab.train(_spec(lab, name, log_every=1), start, STEPS) if compared and log_every > 1 else straight
    # Committed last: it is what the two replicas start from.
    checkpoint_to_gcs(CheckpointToGcsCall.of(lab.request(spec, start, CUT), first), lab.place(spec))
    fit, weights = fit_losses(lab, spec, start, steps=STEPS if compared else 0)
    return {
        "differing": differing(*tensors),
        "digests": [end.state_digest for end in ends if end is not None],
        "rows": [[row.model_dump() for row in rows_of(each)] for each in ([straight], [first, second])],
        "losses": [dict(row.metrics) for row in of_steps.history],
        "fit": fit,
        "weights": weights,
    }


def _two_replicas(lab: Lab, name: str, log_every: int) -> dict[str, Any]:
    """Continue on two replicas.

    Returns:
        "changed": paths whose values on two replicas are not those of the checkpoint. "at": its step. "went_on": rows
        of the steps that follow.
    """
    from baton.tasks.foundation.machine.devices import acquire
    from baton.tasks.foundation.state.warm_state import Recipe
    from baton.tasks.train_segment.trainer import put_back_trainer, take_trainer

    spec = _spec(lab, name, log_every=log_every, replicas=2)
    tip = lab.begin(spec).tip
    assert tip is not None
    recipe = Recipe(spec=spec, dataset=lab.prepare(spec), code_folder=lab.code)
    trainer = take_trainer(recipe, storage=lab.storage, accelerator=acquire(spec.accelerator, None))
    trainer.restore(lab.home(spec), tip)
    stored = _stored(lab, spec, tip)
    changed = [leaf.path for leaf in trainer.state.leaves if not _kept(leaf, stored[leaf.path])]
    put_back_trainer(trainer)
    result = lab.train(spec, tip, CUT + log_every)
    return {
        "changed": changed,
        "at": tip.step,
        "went_on": [row.model_dump() for row in result.history],
    }


def _kept(leaf: Any, stored: Any) -> bool:
    """Whether replica 0 holds the stored value, and replica 1 its share: its own seed, no sums, or the same."""
    first, *others = [part.numpy() for part in leaf.components]
    if first.tobytes() != stored.tobytes():
        return False
    if leaf.seed:
        return all(other[1] == first[1] and other[0] != first[0] for other in others)
    if leaf.path.startswith("metrics/"):
        return not any(np.any(other) for other in others)
    return all(other.tobytes() == stored.tobytes() for other in others)


def _stored(lab: Lab, spec: RunSpec, ref: CheckpointRef) -> dict[str, Any]:
    """The values of a checkpoint that one replica wrote, by path."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(lab.folder(spec, ref) / "ckpt"))
    keys = [key for key in reader.get_variable_to_shape_map() if key.endswith(_SUFFIX)]
    return {key.removesuffix(_SUFFIX).partition("/replica_")[0]: reader.get_tensor(key) for key in keys}


def fit_losses(
    lab: Lab, spec: RunSpec, start: CheckpointRef, *, steps: int = STEPS
) -> tuple[list[dict[str, float]], int]:
    """The metrics of each step of `keras.Model.fit`, from the weights of a checkpoint, with the same batches.

    The model is built in Keras alone, and so are the callbacks, from the example's own files.

    Returns:
        The metrics; and how many weights the model has.
    """
    import keras
    import tensorflow as tf

    from baton.tasks.foundation.dataset.manifest import load_manifest
    from baton.tasks.foundation.dataset.model_inputs import model_inputs
    from baton.tasks.foundation.dataset.read import training_dataset
    from baton.tasks.foundation.model.variables import leaves_of

    dataset = lab.prepare(spec)
    batches = training_dataset(
        lab.storage,
        dataset,
        seed=spec.train.seed,
        global_batch_size=spec.train.global_batch_size,
        window_shards=spec.data.window_shards,
        first_batch=0,
        shuffle=spec.data.shuffle,
        functions=model_inputs(spec, load_manifest(lab.storage, dataset).features, lab.code).training_functions,
    ).take(steps)
    if len(batches.element_spec) == 1:
        batches = batches.map(lambda x: x)

    keras.utils.clear_session(free_memory=False)  # automatic names count from zero, as in a new process
    keras.config.set_dtype_policy("float32")
    build_model = _imported(lab.code, "model").build_model
    asks_for_epoch = "steps_per_epoch" in inspect.signature(build_model).parameters
    per_epoch = math.ceil(dataset.train_examples / spec.train.global_batch_size)
    model = build_model(**spec.model.options, **({"steps_per_epoch": per_epoch} if asks_for_epoch else {}))
    if not model.built and type(model).call is not keras.Model.call:
        first = next(iter(batches))
        model(first[0] if isinstance(first, tuple) else first)
    model.optimizer.build(model.trainable_variables)
    values = {path: value for path, value in _stored(lab, spec, start).items() if path.startswith(_OF_THE_MODEL)}
    for leaf in leaves_of(model):
        if leaf.path in values:
            leaf.variable.assign(tf.constant(values.pop(leaf.path)))
    assert not values, f"fit's model lacks {sorted(values)}"

    class EachStep(keras.callbacks.Callback):  # type: ignore[misc]
        """Keeps the metrics of each step: `logs` would be their means since the epoch began."""

        def __init__(self) -> None:
            super().__init__()
            self.rows: list[dict[str, float]] = []

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            self.model.reset_metrics()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            self.rows.append({name: float(np.mean(value)) for name, value in logs.items()})

    each = EachStep()
    if steps:
        own = _imported(lab.code, "callbacks").build_callbacks() if spec.train.callbacks else []
        with contextlib.chdir(lab.root):  # for what callbacks save
            model.fit(batches, verbose=0, callbacks=[each, *own])
    return each.rows, sum(int(np.prod(weight.shape)) for weight in model.weights)


_numbers = itertools.count()


def _imported(code: Path, module: str) -> Any:
    """Import a module of a folder as a package of its own, without Baton."""
    package = f"plain_{next(_numbers)}"
    spec = importlib.util.spec_from_loader(package, loader=None, is_package=True)
    assert spec is not None
    spec.submodule_search_locations = [str(code)]
    sys.modules[package] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"{package}.{module}")


def largest_difference(one: Sequence[dict[str, float]], other: Sequence[dict[str, float]]) -> float:
    """The largest relative difference of any metric of any step; of numbers below 1, the absolute one.

    Raises:
        AssertionError: the steps or the metrics differ.
    """
    assert len(one) == len(other) == STEPS
    assert all(row.keys() == twin.keys() for row, twin in zip(one, other, strict=True)), (one[0], other[0])
    return max(
        abs(row[name] - twin[name]) / max(1.0, abs(twin[name]))
        for row, twin in zip(one, other, strict=True)
        for name in row
    )
