"""Evaluates the state that a process keeps, which is the one that it trains."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from tasks.evaluate.confusion import Confusion, Counts, labels_of
from tasks.evaluate.loop import Evaluator, Metrics
from tasks.foundation.contracts.data_spec import SetName
from tasks.foundation.contracts.dataset import DatasetRef
from tasks.foundation.dataset.evaluation_sets import set_batches, set_remainder
from tasks.foundation.dataset.manifest import zero_examples
from tasks.foundation.machine.batches import per_replica_batch_size
from tasks.foundation.machine.devices import Accelerator
from tasks.foundation.model.isolated_build import preserved_random_states
from tasks.foundation.model.metrics import trace_returned_metrics
from tasks.foundation.state.warm_state import PROCESS_STATE, Recipe, WarmState, build_warm_state
from tasks.foundation.storage.base import Storage

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _SeparateState:
    """A state for evaluations only, kept with the one that is trained."""

    warm: WarmState


def take_state(recipe: Recipe, *, storage: Storage, accelerator: Accelerator) -> WarmState:
    """Take the state to evaluate; `keep_state` keeps it again when the evaluation has succeeded.

    It is the state of the process. If Python code, such as a callback, has changed attributes of that model, its
    `test_step` may differ from the one that another process would trace. `evaluate_state` then puts them back while it
    traces; if they cannot be put back, it is a second state.

    Args:
        recipe: what to build it from.
        storage: the storage root, with the dataset.
        accelerator: the process's.
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

    Args:
        warm: the state.
        dataset: the prepared dataset.
        storage: the storage root, with the dataset.
        on: the set.

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
    strategy = state.accelerator.strategy
    tally = Confusion(state.model, strategy, labels)
    evaluator = Evaluator(state.model, strategy, tally, reference=warm.spec.model.build, draws=state.draws)
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
    # Each host reads its part of every global batch.
    per_host = per_replica * len(accelerator.local_replicas)
    function, seed = warm.inputs.validation_function, spec.train.seed
    full = set_batches(storage, dataset, on=on, batch_size=per_host, function=function, seed=seed)
    full = full.shard(accelerator.hosts, accelerator.host)
    if per_host > per_replica:
        full = full.rebatch(per_replica, drop_remainder=True)
    with preserved_random_states(), warm.attributes_as_built():
        warm.seed_as_built()
        if warm.state.draws is not None:
            warm.state.draws.begin_evaluation(warm.state.step)
        return evaluator_of(warm, per_replica).evaluate(
            warm.state.leaves,
            full=full,
            full_batches=dataset.examples_of(on) // batch_size,
            remainder=set_remainder(storage, dataset, on=on, batch_size=batch_size, function=function, seed=seed),
            on=on,
        )


def _evaluator_of(warm: WarmState, per_replica: int) -> Evaluator[dict[str, float]]:
    """The compiled evaluation of a state; compiling it can take minutes, so it is kept with the state."""
    evaluator = warm.companion(Evaluator)
    if evaluator is None:
        state, reference = warm.state, warm.spec.model.build
        batch = zero_examples(warm.inputs.validation, per_replica)
        returned = trace_returned_metrics(
            state.model,
            "test_step",
            batch,
            reference=reference,
            accelerator=state.accelerator,
            draws=state.draws,
        )
        strategy, draws = state.accelerator.strategy, state.draws
        metrics = Metrics(state.model, strategy, returned)
        evaluator = Evaluator(state.model, strategy, metrics, reference=reference, draws=draws)
        warm.keep_companion(evaluator)
    return evaluator
