"""Runs a step over the examples of a set, each exactly once, on any number of replicas: `test_step`, or a count.

Full batches run on all replicas. The remainder runs unpadded on replica 0 alone: metrics from `metrics=[…]` ignore
sample weights, so padding would count.

An evaluation uses the model that training uses. It resets and updates metrics, may draw random numbers or assign
variables in the user's own `test_step`, and evaluates the averages of `use_ema`. All of that is put back, bit for bit,
by `state/warm_state.py`.

`Confusion` counts which classes a classifier takes for which others. A classifier is a model with one of Keras's
cross-entropies as its only loss, Keras's own `test_step`, and one number for each class, or one for two classes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

import keras
import tensorflow as tf
from tensorflow.python.framework import auto_control_deps_utils

from baton.tasks.foundation.contracts.data_spec import SetName
from baton.tasks.foundation.dataset.shards import original_read_errors
from baton.tasks.foundation.errors import ModelError
from baton.tasks.foundation.model.hidden_state import require_no_hidden_state
from baton.tasks.foundation.model.keras_steps import (
    SCALED_LOSSES,
    called_like_fit,
    not_converted,
    overrides,
    reset_metrics,
)
from baton.tasks.foundation.model.metrics import ReturnedMetrics, take_metrics
from baton.tasks.foundation.model.randomness import PYTHON_OPERATIONS, StepDraws, exact_draws, nodes_in
from baton.tasks.foundation.model.step import op_errors_as_model_error
from baton.tasks.foundation.model.sums import fix_sum_order
from baton.tasks.foundation.model.variables import Leaf, components, handle_ids, with_inner_optimizers
from baton.tasks.foundation.state.train_state import require_space_to_trace
from baton.tasks.foundation.state.warm_state import HeldValues
from baton.tasks.foundation.user_traceback import user_error


class Metrics:
    """Runs the model's `test_step`; the result is its metrics by name."""

    is_idle = False

    def __init__(self, model: keras.Model, strategy: Any, returned: ReturnedMetrics | None = None) -> None:
        """Prepare it; nothing is traced yet.

        Args:
            strategy: the strategy in whose scope it was built.
            returned: accumulates the values that the user's own test_step returns, if it has one.
        """
        self._model = model
        self._strategy = strategy
        self._returned = returned
        self._step = called_like_fit(model.test_step) if returned is None else returned.step

    def step(self, batch: Sequence[Any]) -> Any:
        """Update the metrics with one replica's batch."""
        return self._step(batch)

    def reset(self) -> None:
        """Reset all metrics."""
        reset_metrics(self._model)
        if self._returned is not None:
            self._returned.reset()

    def take(self) -> dict[str, float]:
        """Read all metrics, and reset them."""
        return take_metrics(self._model, self._strategy, self._returned)


def keeps_averages(model: keras.Model) -> bool:
    """Whether the model's optimizer, or one that it wraps, keeps averages of the weights."""
    return any(getattr(each, "use_ema", False) for each in with_inner_optimizers(model.optimizer))


def use_averages(model: keras.Model) -> None:
    """Replace the model's weights by the averages of `use_ema`, if its optimizer keeps them.

    Before the first step there are none: Keras makes them with zeros, and the weights stay.
    """
    averaging = [each for each in with_inner_optimizers(model.optimizer) if getattr(each, "use_ema", False)]
    # Not `iterations`, which are the updates: with accumulated gradients there are averages before the first one.
    if any(int(components(each._iterations.value)[0]) for each in averaging):
        model.optimizer.finalize_variable_values(model.trainable_variables)


def changed_leaves(leaves: Iterable[Leaf], graphs: Sequence[Any], *, averages: bool) -> tuple[Leaf, ...]:
    """Return the leaves that an evaluation may change.

    Args:
        graphs: of the traced validation loops.
        averages: whether the averages of `use_ema` replace the weights.
    """
    if any(_runs_python(graph) for graph in graphs):
        return tuple(leaves)
    written = set().union(*(_written_handles(graph) for graph in graphs))
    return tuple(
        leaf
        for leaf in leaves
        if leaf.path.startswith("metrics/")  # reset outside of the loops
        or (averages and leaf.trainable)
        or not written.isdisjoint(handle_ids(leaf.variable))
    )


def _written_handles(graph: Any) -> set[int]:
    """Ids of the handles of all captured variables that the graph does not only read."""
    read_only = set(auto_control_deps_utils.get_read_only_resource_input_indices_graph(graph))
    index_of = {id(inside): index for index, inside in enumerate(graph.inputs)}
    return {id(outside) for outside, inside in graph.captures if index_of[id(inside)] not in read_only}


def _runs_python(graph: Any) -> bool:  # which may assign any variable
    return any(node.op in PYTHON_OPERATIONS for node in nodes_in(graph.as_graph_def()))


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Tally(Protocol[T_co]):
    """What an evaluation adds up over the examples."""

    def step(self, batch: Sequence[Any]) -> Any:
        """Add one replica's batch; traced into the compiled loops."""

    @property
    def is_idle(self) -> bool:
        """Whether the traced step adds nothing up, so that it need not run."""

    def reset(self) -> None:
        """Begin anew."""

    def take(self) -> T_co:
        """The result of all replicas; all hosts call it."""


class Evaluator(Generic[T]):
    """The compiled validation loops of one model."""

    def __init__(self, model: keras.Model, tally: Tally[T], *, reference: str, draws: StepDraws) -> None:
        """Prepare the loops; nothing is traced yet.

        Args:
            tally: what is added up.
            reference: the user's name of the model, `model.py:build_model`, for messages.
            draws: seeds of the step's random operations; their replicas take it.
        """
        self._model = model
        self._strategy = strategy = draws.accelerator.strategy
        self._reference = reference
        self._tally = tally
        step = draws.counted(tally.step)
        self._changed: tuple[list[Any], tuple[Leaf, ...]] | None = None
        self._fixed: list[Any] = []

        def run_batches(iterator: Any, n: Any) -> None:
            with exact_draws(draws):
                for _ in tf.range(n):
                    strategy.run(step, args=(next(iterator),))

        def run_remainder(batch: Any) -> None:
            with exact_draws(draws):
                strategy.run(_on_first_replica, args=(step, batch))

        self._run_batches = tf.function(run_batches, jit_compile=False)
        self._run_remainder = tf.function(run_remainder, jit_compile=False)

    def evaluate(
        self,
        leaves: Iterable[Leaf],
        *,
        full: Callable[[tf.distribute.InputContext], tf.data.Dataset],
        full_batches: int,
        remainder: tf.data.Dataset | None,
        on: SetName = "validation",
    ) -> T:
        """The tally of all examples, with the averages of `use_ema` if there are any. The train state stays as it is.

        Args:
            leaves: of the train state that the model belongs to.
            full: makes per-replica batches of static size for the replicas of an input pipeline.
            full_batches: number of global batches.
            remainder: one smaller batch with the other examples, or None.
            on: the set, for messages.

        Raises:
            ModelError: `test_step` cannot be traced, uses state that is not saved, or one of its operations failed. The
                train state is then unknown.
        """
        failed = f"{self._reference}: test_step failed on the {on} examples"
        with self._strategy.scope(), op_errors_as_model_error(failed), original_read_errors():
            calls: list[tuple[Any, tuple[Any, ...]]] = []
            if full_batches:
                iterator = iter(self._strategy.distribute_datasets_from_function(full))
                calls.append((self._run_batches, (iterator, tf.constant(full_batches, tf.int64))))
            calls += [(self._run_remainder, (batch,)) for batch in remainder or ()]
            traced = [self._traced(function, *arguments) for function, arguments in calls]
            if self._tally.is_idle:
                return self._tally.take()
            held = self._hold(leaves, traced)
            use_averages(self._model)
            self._tally.reset()
            for function, arguments in calls:
                function(*arguments)
            result = self._tally.take()
            held.put_back()
        return result

    def _hold(self, leaves: Iterable[Leaf], functions: Sequence[Any]) -> HeldValues:
        """The values of the leaves that these traced loops may change."""
        graphs = [function.graph for function in functions]
        # Searching a large graph takes a while, and every evaluation has the same graphs.
        if self._changed is None or self._changed[0] != graphs:
            self._changed = graphs, changed_leaves(leaves, graphs, averages=keeps_averages(self._model))
        return HeldValues(self._changed[1])

    def _traced(self, function: Any, *arguments: Any) -> Any:
        """The concrete function for these arguments."""
        require_space_to_trace()
        try:
            with SCALED_LOSSES.recorded():
                traced = function.get_concrete_function(*arguments)
        except (Exception, SystemExit) as fault:
            raise ModelError(user_error(f"{self._reference}: test_step cannot be traced:", fault)) from fault
        if traced.graph not in self._fixed:
            require_no_hidden_state(traced, f"{self._reference}: test_step")
            fix_sum_order(traced, self._strategy)
            self._fixed.append(traced.graph)
        return traced


def _on_first_replica(step: Callable[[Any], Any], batch: Any) -> None:
    """Run a step on replica 0 only.

    MirroredStrategy traces each replica with its id. On a TPU all replicas run one program, which needs a condition.
    """
    context = tf.distribute.get_replica_context()
    known = tf.get_static_value(context.replica_id_in_sync_group)
    if known is not None:
        if known == 0:
            step(batch)
        return

    def run() -> Any:
        step(batch)
        return tf.constant(0)

    tf.cond(tf.equal(context.replica_id_in_sync_group, 0), run, lambda: tf.constant(0))


Counts = tuple[tuple[int, ...], ...]
MOST_CLASSES: Final = 50
_RANK: Final = 2  # examples and classes
_HALF: Final = 0.5
_Labels = Literal["index", "one-hot", "binary"]
_LOSSES: Sequence[tuple[_Labels, tuple[type, ...], Any]] = (
    ("index", (keras.losses.SparseCategoricalCrossentropy,), keras.losses.sparse_categorical_crossentropy),
    ("one-hot", (keras.losses.CategoricalCrossentropy,), keras.losses.categorical_crossentropy),
    ("binary", (keras.losses.BinaryCrossentropy,), keras.losses.binary_crossentropy),
)


def labels_of(model: keras.Model, batch: Sequence[Any]) -> _Labels | None:
    """How a classifier's labels say their class; None if the model is no classifier.

    Args:
        batch: x, y and more of any example, which is not looked at but for the shape of y.
    """
    shape = getattr(batch[1], "shape", None) if len(batch) > 1 else None
    if shape is None or len(shape) > _RANK or overrides(model, "test_step"):
        return None
    loss = keras.losses.get(model.loss) if isinstance(model.loss, str) else model.loss
    labels = next((labels for labels, kinds, function in _LOSSES if isinstance(loss, kinds) or loss is function), None)
    return labels if labels == "one-hot" or shape[1:] in {(), (1,)} else None


class Confusion:
    """Counts the examples by label and predicted class.

    The result has a row for each label and a column for each prediction; None if the model has another number of
    outputs than a classifier of at most `MOST_CLASSES` classes. Each example counts 1, whatever its sample weight.
    """

    def __init__(self, model: keras.Model, strategy: Any, labels: _Labels) -> None:
        """Create the counts; nothing is traced yet.

        Args:
            strategy: the strategy in whose scope it was built.
            labels: see `labels_of`.
        """
        self._model = model
        self._labels = labels
        # Keras's own binary accuracy asks for more than one half of a probability.
        self._threshold = 0.0 if getattr(model.loss, "from_logits", False) else _HALF
        self._classes: int | None = None
        with strategy.scope():
            self._sums = tf.Variable(
                tf.zeros((MOST_CLASSES, MOST_CLASSES), tf.int64),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )

    @property
    def is_idle(self) -> bool:
        """Whether the traced model is none whose classes can be counted."""
        return self._classes is None

    def step(self, batch: Sequence[Any]) -> None:
        """Predict one replica's batch, and count."""
        _, y, _ = keras.utils.unpack_x_y_sample_weight(tuple(batch))
        # As `evaluate` calls the model, whatever the user's own predict_step does.
        self._count(y, keras.Model.predict_step(self._model, tuple(batch)))

    def reset(self) -> None:
        """Begin anew."""
        self._sums.assign(tf.zeros_like(self._sums))

    def take(self) -> Counts | None:
        """The counts of all replicas."""
        if self._classes is None:
            return None
        counts = tf.convert_to_tensor(self._sums).numpy()[: self._classes, : self._classes]
        return tuple(tuple(int(number) for number in row) for row in counts)

    @not_converted
    def _count(self, y: Any, outputs: Any) -> None:
        both = tf.is_tensor(y) and tf.is_tensor(outputs)
        if not both or outputs.shape.rank != _RANK or not 1 <= (outputs.shape[1] or 0) <= MOST_CLASSES:
            return
        scores, single = tf.cast(outputs, tf.float32), outputs.shape[1] == 1
        if self._labels == "binary" and single:
            predicted, label = scores[:, 0] > self._threshold, tf.cast(y, tf.float32) > _HALF
        elif self._labels == "one-hot" and not single:
            predicted, label = tf.argmax(scores, axis=1), tf.argmax(y, axis=1)
        elif self._labels == "index" and not single:
            predicted, label = tf.argmax(scores, axis=1), y
        else:
            return
        self._classes = max(2, outputs.shape[1])
        rows, columns = (
            tf.one_hot(tf.cast(tf.reshape(each, (-1,)), tf.int32), MOST_CLASSES) for each in (label, predicted)
        )
        self._sums.assign_add(tf.cast(tf.matmul(rows, columns, transpose_a=True), tf.int64))
