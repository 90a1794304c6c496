"""The stage `evaluate`: evaluates a committed checkpoint and logs its metrics.

It evaluates the state that the process keeps, which is the one that it trains, so nothing is read or compiled twice. If
that state holds another checkpoint, the wanted one is restored into it.
"""

import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TypeVar

import tensorflow as tf

from baton.tasks.evaluate.evaluator import Confusion, Counts, Evaluator, Metrics, labels_of
from baton.tasks.foundation.checkpoint.restore import restore_warm_state
from baton.tasks.foundation.checkpoint.save import wait_for_save
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.data_spec import SetName
from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.contracts.home_files import ConfusionMatrix, confusion_path
from baton.tasks.foundation.contracts.identity import keep_best_of
from baton.tasks.foundation.contracts.log_entry import Body, Commit, Entry, Evaluation, EvaluationOnTest, Head
from baton.tasks.foundation.contracts.placement import per_replica_batch_size
from baton.tasks.foundation.contracts.run_spec import KeepBest, RunSpec
from baton.tasks.foundation.contracts.stage_calls import EvaluateCall
from baton.tasks.foundation.dataset.evaluation_sets import set_batches, set_remainder
from baton.tasks.foundation.dataset.manifest import load_manifest, zero_examples
from baton.tasks.foundation.errors import FileAlreadyThere
from baton.tasks.foundation.log.history import evaluation_on_test_of
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.machine.devices import Accelerator, acquire
from baton.tasks.foundation.machine.threads import run_in_work_thread
from baton.tasks.foundation.model.build import preserved_random_states
from baton.tasks.foundation.model.metrics import Results, require_metric, trace_returned_metrics
from baton.tasks.foundation.model.step import invalid_input_as_step_failed
from baton.tasks.foundation.stage import Place
from baton.tasks.foundation.state.warm_state import PROCESS_STATE, Recipe, WarmState, build_warm_state
from baton.tasks.foundation.storage.interface import Storage, best_effort
from baton.tasks.foundation.telemetry.events import Evaluated, Phase
from baton.tasks.foundation.telemetry.ledger import seconds_between

T = TypeVar("T")
_Batches = Callable[[tf.distribute.InputContext], tf.data.Dataset]


@dataclass(frozen=True, slots=True)
class _SeparateState:
    """A state for evaluations only, kept with the one that is trained."""

    warm: WarmState


@dataclass(frozen=True, slots=True)
class _Sets:
    """The examples of each set, kept with the state: to trace how they are read takes longer than to read a few."""

    storage: Storage
    dataset: DatasetRef
    made: dict[SetName, tuple[_Batches, tf.data.Dataset | None]] = field(default_factory=dict)


def take_state(recipe: Recipe, *, storage: Storage, accelerator: Accelerator) -> WarmState:
    """Take the state to evaluate; `keep_state` keeps it again when the evaluation has succeeded.

    It is the state of the process. If Python code, such as a callback, has changed attributes of that model, its
    `test_step` may differ from the one that another process would trace. `evaluate_state` then puts them back while it
    traces; if they cannot be put back, it is a second state.

    Args:
        recipe: what to build it from.
    """
    warm = PROCESS_STATE.take(recipe, storage=storage, accelerator=accelerator)
    if warm.companion(Evaluator) is not None or not warm.attributes_changed or warm.can_put_back_attributes:
        return warm
    separate = warm.companion(_SeparateState)
    if separate is None:
        separate = _SeparateState(build_warm_state(recipe, storage=storage, accelerator=accelerator))
        warm.keep_companion(separate)
    PROCESS_STATE.keep(warm)
    return separate.warm


def keep_state(warm: WarmState) -> None:
    """Keep a state from `take_state` for the next stage."""
    kept = PROCESS_STATE.kept
    separate = None if kept is None else kept.companion(_SeparateState)
    if separate is None or separate.warm is not warm:
        PROCESS_STATE.keep(warm)


def evaluate_state(
    warm: WarmState, dataset: DatasetRef, storage: Storage, *, on: SetName = "validation"
) -> dict[str, float]:
    """Evaluate a state on every example of a set once. The state stays as it is.

    Returns:
        Metrics by name.

    Raises:
        ModelError: `test_step` cannot be traced, or fails; the state is then unknown.
    """
    return _over_examples(warm, dataset, storage, _evaluator_of, on=on)


def confusion_of(warm: WarmState, dataset: DatasetRef, storage: Storage) -> Counts | None:
    """Count, in a pass of its own over the validation examples, which classes a state takes for which others.

    The metrics are computed without it, so it changes none of their bits. For arguments and errors see
    `evaluate_state`.

    Returns:
        See `Confusion`; None also if the model is no classifier.
    """
    state = warm.state
    labels = labels_of(state.model, zero_examples(warm.inputs.validation, 1))
    if labels is None:
        return None
    tally = Confusion(state.model, state.accelerator.strategy, labels)
    evaluator = Evaluator(state.model, tally, reference=warm.spec.model.build, draws=state.draws)
    return _over_examples(warm, dataset, storage, lambda *_: evaluator, on="validation")


def _over_examples(
    warm: WarmState,
    dataset: DatasetRef,
    storage: Storage,
    evaluator_of: Callable[[WarmState, int], Evaluator[T]],
    *,
    on: SetName,
) -> T:
    """Run an evaluator, which is made where the model is as it was built, over every example of a set once."""
    spec, accelerator = warm.spec, warm.state.accelerator
    batch_size = spec.train.global_batch_size
    per_replica = per_replica_batch_size(batch_size, accelerator.replicas)
    full, remainder = _set_of(warm, dataset, storage, on=on, per_replica=per_replica)
    with preserved_random_states(), warm.attributes_as_built():
        warm.seed_as_built()
        warm.state.draws.begin_evaluation(warm.state.step)
        return evaluator_of(warm, per_replica).evaluate(
            warm.state.leaves,
            full=full,
            full_batches=dataset.examples_of(on) // batch_size,
            remainder=remainder,
            on=on,
        )


def _set_of(
    warm: WarmState, dataset: DatasetRef, storage: Storage, *, on: SetName, per_replica: int
) -> tuple[_Batches, tf.data.Dataset | None]:
    """What makes the full batches of a set for some replicas, and the batch that is left, or None; kept in `_Sets`."""
    sets, accelerator = warm.companion(_Sets), warm.state.accelerator
    if sets is None or sets.storage is not storage or sets.dataset != dataset:
        sets = _Sets(storage, dataset)
        warm.keep_companion(sets)
    if on not in sets.made:
        function, train = warm.inputs.validation_function, warm.spec.train

        @cache
        def part(host: int, hosts: int) -> tf.data.Dataset:
            # Each host reads its part of every global batch.
            size, servers = train.global_batch_size // hosts, accelerator.has_servers
            with preserved_random_states():
                warm.seed_as_built()
                batches = set_batches(
                    storage, dataset, on=on, batch_size=size, function=function, seed=train.seed, on_server=servers
                ).shard(hosts, host)
                return batches if size == per_replica else batches.rebatch(per_replica, drop_remainder=True)

        with preserved_random_states():
            warm.seed_as_built()
            left = set_remainder(
                storage, dataset, on=on, batch_size=train.global_batch_size, function=function, seed=train.seed
            )
        sets.made[on] = lambda context: part(context.input_pipeline_id, context.num_input_pipelines), left
    return sets.made[on]


def _evaluator_of(warm: WarmState, per_replica: int) -> Evaluator[dict[str, float]]:
    """The compiled evaluation of a state; compiling it can take minutes, so it is kept with the state."""
    evaluator = warm.companion(Evaluator)
    if evaluator is None:
        state, reference = warm.state, warm.spec.model.build
        batch = zero_examples(warm.inputs.validation, per_replica)
        returned = trace_returned_metrics(state.model, "test_step", batch, reference=reference, draws=state.draws)
        metrics = Metrics(state.model, state.accelerator.strategy, returned)
        evaluator = Evaluator(state.model, metrics, reference=reference, draws=state.draws)
        warm.keep_companion(evaluator)
    return evaluator


def evaluate(call: EvaluateCall, place: Place) -> Evaluation:
    """Evaluate a checkpoint on every example of a set once, and log the metrics.

    Metrics on the test set are another kind of entry: early stopping and keep-best never see them.

    With `use_ema` the averaged weights are used, as Keras does at the end of `fit`. If the state of this process holds
    the checkpoint, nothing is read, and the state is the same afterwards. The checkpoint may be in flight then: its
    evaluation is logged after its commit.

    Args:
        call: the run file, the dataset, the set, the checkpoint and the run's environment.
        place: where the run's home and the user's code are.

    Returns:
        The metrics. Its checkpoint is `call.checkpoint`, so it is not the logged entry if that is in flight.

    Raises:
        ModelError: `checkpoint.keep_best` names a metric that the model does not have.
        StepFailed: `test_step` fails.
        DamagedCheckpoint: the checkpoint's files differ from its manifest.
        IdentityChanged: the model keeps other vocabularies, tables or arrays than the run.
    """
    return run_in_work_thread(lambda: _evaluate(call, place))


def _evaluate(call: EvaluateCall, place: Place) -> Evaluation:
    spec, dataset, checkpoint, on = call.spec, call.dataset, call.checkpoint, call.on
    began = place.clock()
    accelerator = acquire(spec.accelerator, call.recorded, deterministic=spec.train.deterministic)
    recipe = Recipe(spec=spec, dataset=dataset, code_folder=place.code_folder)
    warm = take_state(recipe, storage=place.root, accelerator=accelerator)
    if checkpoint.is_in_flight and not accelerator.all_agree(warm.holds(checkpoint)):
        # It is restored from the store.
        checkpoint = _committed(checkpoint, place, accelerator)
    if not warm.has_recorded_contents:
        warm.require_recorded_contents(place.log.require_head().identity, home=place.home.uri)
    if restore_warm_state(warm, place.home, checkpoint):
        place.log.note_read(checkpoint.path)
    with invalid_input_as_step_failed():
        metrics = evaluate_state(warm, dataset, place.root, on=on)
        seconds = seconds_between(began, place.clock())
        wanted = call.confusion_matrix and on == "validation"
        counts = confusion_of(warm, dataset, place.root) if wanted else None
    rule = _keep_best(spec, place.log) if on == "validation" else None
    require_metric(rule, Results(numbers=metrics))
    keep_state(warm)
    examples = dataset.examples_of(on)
    body = Evaluation(checkpoint=checkpoint, metrics=metrics, examples=examples, seconds=seconds, keep_best=rule, on=on)
    if on == "validation":
        warm.evaluation = body  # callbacks read it

    def log(committed: CheckpointRef) -> None:
        done = body.model_copy(update={"checkpoint": committed})
        if accelerator.is_chief:
            decide = _decide(done, place.log) if on == "validation" else _decide_test(done, dataset, place.log)
            place.log.append(decide, attempt=uuid.uuid4().hex)
            _save_confusion(counts, committed, dataset, place)
        place.telemetry.emit(Evaluated(step=committed.step, metrics=metrics, examples=examples, on=on))

    if accelerator.is_chief and checkpoint.is_in_flight and place.saves is not None:
        place.saves.then(lambda entry: log(_checkpoint_of(entry)))
    else:
        log(checkpoint)
    return body


def _keep_best(spec: RunSpec, log: RunLog) -> KeepBest | None:
    """The rule by which the best checkpoint is kept: the run file's, or that of a callback."""
    if spec.checkpoint.keep_best is not None or spec.train.callbacks is None:
        return spec.checkpoint.keep_best
    return keep_best_of(spec, log.require_head().identity)


def _save_confusion(
    counts: Counts | None,
    checkpoint: CheckpointRef,
    dataset: DatasetRef,
    place: Place,
) -> None:
    """Save a confusion matrix, create-only. Nothing but the report depends on it, so a failure is a warning."""
    if counts is None:
        return
    with best_effort(place.home, "the confusion matrix was not saved", then="the report has none"):
        names = load_manifest(place.root, dataset).class_names
        names = names if len(names) == len(counts) else ()
        matrix = ConfusionMatrix(checkpoint=checkpoint.path, step=checkpoint.step, counts=counts, class_names=names)
        with suppress(FileAlreadyThere):
            place.home.create(confusion_path(checkpoint.path), matrix.to_json())


def _committed(checkpoint: CheckpointRef, place: Place, accelerator: Accelerator) -> CheckpointRef:
    """The committed checkpoint of one that is in flight; waits for it. With several hosts, all of them call it."""
    place.telemetry.emit(Phase(cause="commit"))
    number = wait_for_save(place.saves, accelerator)
    place.telemetry.emit(Phase(cause="evaluate"))
    if number is None:
        raise AssertionError(f"{checkpoint.path} is in flight, and no save is")
    return _checkpoint_of(place.log.entry(number))


def _checkpoint_of(entry: Entry) -> CheckpointRef:
    if not isinstance(entry.body, Commit):
        raise TypeError(f"entry {entry.number} of the log is no commit")
    return entry.body.checkpoint


def _decide(body: Evaluation, log: RunLog) -> Callable[[Head | None], Body | None]:
    """The entry, or None if another process has evaluated the same checkpoint meanwhile."""

    def decide(head: Head | None) -> Body | None:
        if head is None or body.checkpoint.path in head.evaluated:
            return None
        return body.model_copy(update={"read": log.reads_to_log(head)})

    return decide


def _decide_test(done: Evaluation, dataset: DatasetRef, log: RunLog) -> Callable[[Head | None], Body | None]:
    """The entry, or None if the log has an evaluation of the same checkpoint on the same test set."""
    own = dataset.own_set("test")
    body = EvaluationOnTest(
        checkpoint=done.checkpoint,
        metrics=done.metrics,
        examples=done.examples,
        seconds=done.seconds,
        content_digest="" if own is None else own.content_digest,
        folder=None if own is None else own.folder,
    )

    def decide(head: Head | None) -> Body | None:
        known = None if head is None else evaluation_on_test_of(log, head, body.checkpoint.path)
        again = known is not None and known.content_digest == body.content_digest
        if head is None or again:
            return None
        return body.model_copy(update={"read": log.reads_to_log(head)})

    return decide
