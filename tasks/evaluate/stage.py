"""The stage `evaluate`: evaluates a committed checkpoint and logs its metrics."""

import uuid

from tasks.evaluate.averages import use_averages
from tasks.evaluate.warm_evaluator import WARM_EVALUATOR, Recipe
from tasks.foundation.accelerator.batches import per_replica_batch_size
from tasks.foundation.accelerator.strategy import acquire
from tasks.foundation.checkpoint.restore import restore_checkpoint
from tasks.foundation.contracts.log_entry import Body, Evaluation, Head
from tasks.foundation.contracts.stage_calls import EvaluateCall
from tasks.foundation.dataset.reader import validation_dataset, validation_remainder
from tasks.foundation.model.metrics import require_metric
from tasks.foundation.model.train_step import invalid_input_as_step_failed
from tasks.foundation.stage import Place
from tasks.foundation.telemetry.events import Evaluated
from tasks.foundation.telemetry.measurements import seconds_between


def evaluate(call: EvaluateCall, place: Place) -> Evaluation:
    """Evaluate a committed checkpoint on every validation example once, and log the metrics.

    With `use_ema` the averaged weights are used, as Keras does at the end of `fit`.

    Args:
        call: the run file, the dataset, the checkpoint and the run's environment.
        place: where the run's home and the user's code are.

    Raises:
        ModelError: `checkpoint.keep_best` names a metric that the model does not have.
        StepFailed: `test_step` fails.
        DamagedCheckpoint: the checkpoint's files differ from its manifest.
    """
    spec, dataset, checkpoint, storage = call.spec, call.dataset, call.checkpoint, place.root
    began = place.clock()
    accelerator = acquire(spec.accelerator, call.recorded, deterministic=spec.train.deterministic)
    batch_size = spec.train.global_batch_size
    per_replica = per_replica_batch_size(batch_size, accelerator.replicas)
    recipe = Recipe(spec, dataset, place.code_folder)
    state, evaluator = WARM_EVALUATOR.take(recipe, storage, accelerator, per_replica)
    restore_checkpoint(state, place.home, checkpoint)
    use_averages(state.model)
    examples = dataset.validation_examples
    full_batches = examples // batch_size
    # Each host reads its part of every global batch.
    per_host = per_replica * len(accelerator.local_replicas)
    full = validation_dataset(storage, dataset, batch_size=per_host).shard(accelerator.hosts, accelerator.host)
    if per_host > per_replica:
        full = full.rebatch(per_replica, drop_remainder=True)
    with invalid_input_as_step_failed():
        metrics = evaluator.evaluate(
            full=full,
            full_batches=full_batches,
            remainder=validation_remainder(storage, dataset, batch_size=batch_size),
        )
    rule = spec.checkpoint.keep_best
    require_metric(rule, metrics)
    seconds = seconds_between(began, place.clock())
    body = Evaluation(checkpoint=checkpoint, metrics=metrics, examples=examples, seconds=seconds, keep_best=rule)
    if accelerator.is_chief:
        place.log.append(lambda head: _unless_done(head, body), attempt=uuid.uuid4().hex)
    place.telemetry.emit(Evaluated(step=checkpoint.step, metrics=metrics, examples=examples))
    return body


def _unless_done(head: Head | None, body: Evaluation) -> Body | None:
    """The entry, or None if another process has evaluated the same checkpoint meanwhile."""
    return None if head is None or body.checkpoint.path in head.evaluated else body
