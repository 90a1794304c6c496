"""Seeds of the random operations in train and test steps, as functions of the run's seed, the step and the replica.

TensorFlow's random operations and `keras.random` without a generator draw from hidden states that no checkpoint holds.
While a step is traced, `traced_draws.py` replaces them by stateless operations that take their seeds from here. Each
replica counts its draws within a step, so an operation in a loop, or in a function that is called twice, draws anew.
The count starts again at each step. So it is no part of the train state, however a run is cut.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import tensorflow as tf

from tasks.foundation.accelerator.strategy import Accelerator
from tasks.foundation.model.keras_steps import not_converted
from tasks.foundation.model.variables import Leaf, handle_ids

# The second part of the counter is the step times this, plus the number of draws in the step.
_DRAWS_PER_STEP = 2**24
_TRAINING, _EVALUATION = "train", "test"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptOperation:
    """A random operation that could not be replaced, so it draws from TensorFlow's own state.

    Attributes:
        name: of the operation, such as RandomUniform.
        place: file and line of the user's code.
        why: completes "it cannot be made a function of the step: ...".
    """

    name: str
    place: str
    why: str

    def __str__(self) -> str:
        return f"{self.name} ({self.place}) cannot be made a function of the step: {self.why}"


class StepDraws:
    """The draws of one model's steps.

    Attributes:
        leaf: the counter of each replica. It belongs to no checkpoint.
        kept: random operations that were traced and could not be replaced.
        step_graph: graph of the step that is being traced, or was traced last; a loop within it repeats its operations
            in one step.
    """

    def __init__(self, seed: int, accelerator: Accelerator) -> None:
        """Use the process's counter; nothing is drawn.

        Args:
            seed: `train.seed`.
            accelerator: the process's.
        """
        self._seed = seed
        self._local_replicas = accelerator.local_replicas
        self._strategy = accelerator.strategy
        self.leaf = Leaf(path="draws", variable=_counter_in(accelerator.strategy), per_replica=True)
        self.kept: list[KeptOperation] = []
        self.step_graph: Any = None

    def begin_training(self, step: int) -> None:
        """Set every replica's counter to the first draw of the step after `step`."""
        self._begin(_TRAINING, step)

    def begin_evaluation(self, step: int) -> None:
        """Set every replica's counter to the first draw of an evaluation of the state at `step`."""
        self._begin(f"{_EVALUATION} {step}", 0)

    def counted(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap a step that replicas run, so that the next one begins with a count of 0.

        A step that draws nothing is traced as without this.

        Args:
            step: a function of one replica's batch.
        """

        def work(batch: Any) -> Any:
            self.enter()
            logs = step(batch)
            self.leave()
            return logs

        return work

    @not_converted
    def enter(self) -> None:
        """Note the graph of the step."""
        self.step_graph = tf.compat.v1.get_default_graph()

    @not_converted
    def leave(self) -> None:
        """Move this replica's counter to the next step, if the step in the current graph draws."""
        if self.are_used_by(tf.compat.v1.get_default_graph()):
            counter = self._of_this_replica()
            key, place = tf.unstack(counter.read_value())
            counter.assign(tf.stack([key, (place // _DRAWS_PER_STEP + 1) * _DRAWS_PER_STEP]))

    def are_used_by(self, graph: Any) -> bool:
        """Whether a graph, with its functions and loops, takes seeds from here."""
        handles = handle_ids(self.leaf.variable)
        return any(id(outside) in handles for outside, _ in getattr(graph, "captures", ()))

    def next_seed(self) -> Any:
        """Count one draw. Returns its seed, an int32 tensor [2]. Call it while a step is traced."""
        counter = self._of_this_replica()
        place = counter.read_value()
        counter.assign_add([0, 1])
        return _mixed(place)

    def seed_of_operation(self, number: int) -> Any:
        """The seed of an operation that the user gave the seed `number`; equal ones draw equally, as in TensorFlow."""
        key, place = tf.unstack(self._of_this_replica().read_value())
        own = _number_of(f"operation {number}")
        return _mixed(tf.stack([tf.bitwise.bitwise_xor(key, own), place // _DRAWS_PER_STEP * _DRAWS_PER_STEP]))

    def _begin(self, purpose: str, step: int) -> None:
        for replica, component in zip(self._local_replicas, self.leaf.components, strict=False):
            component.assign([_number_of(f"{self._seed} {purpose} {replica}"), step * _DRAWS_PER_STEP])

    def _of_this_replica(self) -> Any:
        components: Sequence[Any] = self.leaf.components
        # Outside of a step's replicas, as in a symbolic call when a file is imported, what is drawn does not matter.
        is_replica = self._strategy is tf.distribute.get_strategy() and not tf.distribute.in_cross_replica_context()
        return self.leaf.variable if is_replica and len(components) > 1 else components[0]


@lru_cache(maxsize=1)
def _counter_in(strategy: Any) -> Any:
    """The counter of a process, int64 [2] for each replica: a key, and a place in its sequence.

    A `tf.function` of a user's module keeps the counter that it was traced with, also when the model is built again. So
    a process has one.
    """
    with strategy.scope():
        return tf.Variable(
            [0, 0],
            trainable=False,
            dtype=tf.int64,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
            name="draws",
        )


def saved_or_drawn(leaves: Iterable[Leaf], draws: StepDraws | None) -> Iterable[Leaf]:
    """The variables that a step may use: those that are saved, and the counter of the draws."""
    return leaves if draws is None else [*leaves, draws.leaf]


def _number_of(text: str) -> int:
    """A number in [0, 2**63) for a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _mixed(place: Any) -> Any:
    """An int32 seed [2] from an int64 pair. Not every stateless operation takes int64 seeds under XLA."""
    return tf.random.stateless_uniform([2], place, minval=None, maxval=None, dtype=tf.int32, alg="philox")
