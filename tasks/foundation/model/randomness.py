"""Makes what train and test steps draw a function of the run's seed, the step and the replica.

TensorFlow's random operations and `keras.random` without a generator draw from hidden states that no checkpoint holds.
TensorFlow's functions for random numbers, layers of it and gradients of them all come to the generated functions of
`gen_random_ops`, and `keras.random` without a generator comes to one global generator. Within `exact_draws` these few
emit stateless operations with seeds from `StepDraws`. Calls outside of a traced function stay as they are.

Each replica counts its draws within a step, so an operation in a loop, or in a function that is called twice, draws
anew. The count starts again at each step. So it is no part of the train state, however a run is cut. The stateless
operations have the shapes, dtypes and distributions of those that they replace; Philox is named, because the default
algorithm depends on the device. What of hidden state is left in a traced function is found and named.
"""

import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import tensorflow as tf
from keras.src.random import seed_generator
from tensorflow.python.framework import random_seed
from tensorflow.python.ops import (
    gen_candidate_sampling_ops,
    gen_image_ops,
    gen_random_ops,
    stateless_random_ops,
)
from tensorflow.python.util import tf_stack

from baton.tasks.foundation.errors import ModelError
from baton.tasks.foundation.machine.devices import Accelerator
from baton.tasks.foundation.model.keras_steps import in_while_loop, not_converted
from baton.tasks.foundation.model.variables import Leaf, handle_ids
from baton.tasks.foundation.text import message
from baton.tasks.foundation.user_traceback import USER_PACKAGE_PREFIX

_ALGORITHM = "philox"


def _random_uniform(seed: Any, shape: Any, dtype: Any) -> Any:
    return tf.random.stateless_uniform(shape, seed, dtype=dtype, alg=_ALGORITHM)


def _random_uniform_int(seed: Any, shape: Any, minval: Any, maxval: Any) -> Any:
    low = tf.convert_to_tensor(minval)
    high = tf.convert_to_tensor(maxval, low.dtype)
    return tf.random.stateless_uniform(shape, seed, minval=low, maxval=high, dtype=low.dtype, alg=_ALGORITHM)


def _random_standard_normal(seed: Any, shape: Any, dtype: Any) -> Any:
    return tf.random.stateless_normal(shape, seed, dtype=dtype, alg=_ALGORITHM)


def _truncated_normal(seed: Any, shape: Any, dtype: Any) -> Any:
    return tf.random.stateless_truncated_normal(shape, seed, dtype=dtype, alg=_ALGORITHM)


def _parameterized_truncated_normal(seed: Any, shape: Any, *parameters: Any) -> Any:
    return stateless_random_ops.stateless_parameterized_truncated_normal(shape, seed, *parameters)


def _random_shuffle(seed: Any, value: Any) -> Any:
    # XLA has no kernel of StatelessShuffle.
    value = tf.convert_to_tensor(value)
    keys = tf.random.stateless_uniform(
        tf.shape(value)[:1], seed, minval=None, maxval=None, dtype=tf.int32, alg=_ALGORITHM
    )
    return tf.ensure_shape(tf.gather(value, tf.argsort(keys, stable=True)), value.shape)


def _multinomial(seed: Any, logits: Any, num_samples: Any, output_dtype: Any = tf.int64) -> Any:
    return tf.random.stateless_categorical(logits, num_samples, seed, dtype=output_dtype)


def _random_gamma(seed: Any, shape: Any, alpha: Any) -> Any:
    alpha = tf.convert_to_tensor(alpha)
    return tf.random.stateless_gamma(_with_rates(shape, alpha), seed, alpha, dtype=alpha.dtype)


def _random_poisson_v2(seed: Any, shape: Any, rate: Any, dtype: Any = tf.int64) -> Any:
    rate = tf.convert_to_tensor(rate)
    return tf.random.stateless_poisson(_with_rates(shape, rate), seed, rate, dtype=dtype)


def _with_rates(shape: Any, rates: Any) -> Any:
    """The shape of a result with one sample of `shape` for each rate."""
    return tf.concat([tf.convert_to_tensor(shape, tf.int32), tf.shape(rates)], axis=0)


# By the name of the function in TensorFlow's `gen_random_ops`.
STATELESS: Mapping[str, Callable[..., Any]] = {
    "multinomial": _multinomial,
    "parameterized_truncated_normal": _parameterized_truncated_normal,
    "random_gamma": _random_gamma,
    "random_poisson_v2": _random_poisson_v2,
    "random_shuffle": _random_shuffle,
    "random_standard_normal": _random_standard_normal,
    "random_uniform": _random_uniform,
    "random_uniform_int": _random_uniform_int,
    "truncated_normal": _truncated_normal,
}


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
        accelerator: its replicas take the steps.
        leaf: the counter of each replica. It belongs to no checkpoint.
        kept: random operations that were traced and could not be replaced.
        step_graph: graph of the step that is being traced, or was traced last; a loop within it repeats its operations
            in one step.
    """

    def __init__(self, seed: int, accelerator: Accelerator) -> None:
        """Use the process's counter; nothing is drawn.

        Args:
            seed: `train.seed`.
        """
        self._seed = seed
        self.accelerator = accelerator
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
        for replica, component in zip(self.accelerator.local_replicas, self.leaf.components, strict=False):
            component.assign([_number_of(f"{self._seed} {purpose} {replica}"), step * _DRAWS_PER_STEP])

    def _of_this_replica(self) -> Any:
        components: Sequence[Any] = self.leaf.components
        # Outside of a step's replicas, as in a symbolic call when a file is imported, what is drawn does not matter.
        strategy = self.accelerator.strategy
        is_replica = strategy is tf.distribute.get_strategy() and not tf.distribute.in_cross_replica_context()
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


def _number_of(text: str) -> int:
    """A number in [0, 2**63) for a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _mixed(place: Any) -> Any:
    """An int32 seed [2] from an int64 pair. Not every stateless operation takes int64 seeds under XLA."""
    return tf.random.stateless_uniform([2], place, minval=None, maxval=None, dtype=tf.int32, alg="philox")


# Kernels that draw from TensorFlow's own random state.
RANDOM_KERNELS = frozenset(
    {
        "AllCandidateSampler",
        "FixedUnigramCandidateSampler",
        "LearnedUnigramCandidateSampler",
        "LogUniformCandidateSampler",
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "SampleDistortedBoundingBox",
        "SampleDistortedBoundingBoxV2",
        "ThreadUnsafeUnigramCandidateSampler",
        "TruncatedNormal",
        "UniformCandidateSampler",
    }
)
# Kernels that run Python code; with one of which TensorFlow thinks that it keeps no state.
PYTHON_KERNELS = frozenset({"EagerPyFunc", "PyFunc"})
PYTHON_OPERATIONS = PYTHON_KERNELS | {"PyFuncStateless"}
CLOCK = "baton_clock"

_REMEDIES = (
    "use a function of tf.random with the same distribution, which Baton makes a function of the step",
    "or draw with a keras.random.SeedGenerator or tf.random.Generator that a layer or the model holds",
)


def nodes_in(graph: Any) -> list[Any]:
    """The nodes of a `GraphDef`, with those of the functions that it calls."""
    return [*graph.node, *(node for inner in graph.library.function for node in inner.node_def)]


def nodes_of(function: Any) -> list[Any]:
    """The nodes of a concrete function, with those of the functions that it calls."""
    return nodes_in(function.graph.as_graph_def())


def stateful_operations(function: Any) -> tuple[str, ...]:
    """Names of operations in a concrete function whose state no checkpoint holds: random ones, and Python code."""
    kinds = RANDOM_KERNELS | PYTHON_KERNELS
    return tuple(sorted({node.name for node in nodes_of(function) if node.op in kinds and CLOCK not in node.name}))


def require_exact_draws(function: Any, draws: StepDraws, what: str) -> None:
    """Refuse random operations that draw from TensorFlow's own state, before a run starts with them.

    Args:
        function: a traced step, a concrete function.
        draws: knows the user's lines.
        what: completes "... draws from TensorFlow's own state", for the message.

    Raises:
        ModelError: names the operations, and their lines where they are known.
    """
    left = sorted({(node.op, node.name) for node in nodes_of(function) if node.op in RANDOM_KERNELS})
    if not left:
        return
    kept = {each.name: str(each) for each in draws.kept}
    details = list(dict.fromkeys(kept.get(op, f"{op} ({name} in the graph)") for op, name in left))
    raise ModelError(
        message(
            f"{what} draws random numbers from TensorFlow's own state, which no checkpoint holds, so a resumed run "
            "would differ",
            details=details,
            hints=_REMEDIES,
        )
    )


_NO_STATELESS = "TensorFlow has no stateless operation for it"
_IN_VECTORIZED_MAP = "in tf.vectorized_map all elements would draw the same; use tf.map_fn"
_SEED_IN_LOOP = "it has a seed of its own and is in a loop, where every turn would draw the same; leave out the seed"
_WITHOUT_STATELESS: tuple[tuple[ModuleType, str], ...] = (
    (gen_candidate_sampling_ops, "all_candidate_sampler"),
    (gen_candidate_sampling_ops, "fixed_unigram_candidate_sampler"),
    (gen_candidate_sampling_ops, "learned_unigram_candidate_sampler"),
    (gen_candidate_sampling_ops, "log_uniform_candidate_sampler"),
    (gen_candidate_sampling_ops, "uniform_candidate_sampler"),
    (gen_image_ops, "sample_distorted_bounding_box_v2"),
)
# The function that runs the body of tf.vectorized_map.
_VECTORIZING = ("parallel_for/control_flow_ops.py", "_pfor_impl")
_LIBRARIES = ("/site-packages/", "/dist-packages/", str(Path(__file__).parents[2]))


class _SeedOfOperation(int):
    """The second of TensorFlow's two numbers, where the user gave the operation a seed."""


class _KerasGenerator:
    """Stands in for Keras's global `SeedGenerator` while a step is traced."""

    def __init__(self, draws: StepDraws) -> None:
        self._draws = draws

    def next(self, ordered: bool = True) -> Any:
        """One seed, an int32 tensor [2]."""
        del ordered  # the seeds are as good as independent anyway
        return self._draws.next_seed()


@not_converted
def exact_draws(draws: StepDraws) -> AbstractContextManager[None]:
    """Within the block, random operations that are traced take their seeds from `draws`.

    Use it around all that traces user code: `tf.function` keeps what it has traced once.

    Args:
        draws: the draws of the model's steps.
    """
    return _TRACING.with_draws(draws)


class _Tracing:
    """The draws of the steps that are being traced, and the functions that are replaced meanwhile.

    Two threads may trace at once, so each has its own draws, and the functions stay replaced until both have ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._draws: dict[int, list[StepDraws]] = {}  # by thread
        self._originals: list[tuple[ModuleType, str, Callable[..., Any]]] = []

    @contextmanager
    def with_draws(self, draws: StepDraws) -> Iterator[None]:
        """Use `draws` for what this thread traces in the block."""
        thread = threading.get_ident()
        with self._lock:
            if not self._draws:
                self._replace()
            self._draws.setdefault(thread, []).append(draws)
        try:
            yield
        finally:
            with self._lock:
                self._draws[thread].pop()
                if not self._draws[thread]:
                    del self._draws[thread]
                if not self._draws:
                    self._put_back()

    def current(self) -> StepDraws | None:
        """The draws of this thread's tracing; or the only ones, as TensorFlow traces each replica in its own thread."""
        with self._lock:
            own = self._draws.get(threading.get_ident())
            if own:
                return own[-1]
            others = {id(each): each for stack in self._draws.values() for each in stack}
        return next(iter(others.values())) if len(others) == 1 else None

    def _replace(self) -> None:
        for name in STATELESS:
            self._replace_one(gen_random_ops, name, partial(_stateless, name))
        for module, name in _WITHOUT_STATELESS:
            self._replace_one(module, name, partial(_kept, name))
        self._replace_one(random_seed, "get_seed", _marked)
        self._replace_one(seed_generator, "global_seed_generator", _keras_generator)

    def _replace_one(self, module: ModuleType, name: str, work: Callable[..., Any]) -> None:
        original = getattr(module, name)
        self._originals.append((module, name, original))

        def replacement(*arguments: Any, **settings: Any) -> Any:
            draws = self.current()
            return original(*arguments, **settings) if draws is None else work(draws, original, *arguments, **settings)

        setattr(module, name, not_converted(replacement))

    def _put_back(self) -> None:
        while self._originals:
            module, name, original = self._originals.pop()
            setattr(module, name, original)


_TRACING = _Tracing()  # one for the process, like the modules whose functions it replaces


def _stateless(
    function: str,
    draws: StepDraws,
    original: Callable[..., Any],
    *arguments: Any,
    seed: Any = 0,
    seed2: Any = 0,
    name: str | None = None,
    **settings: Any,
) -> Any:
    """Emit the stateless operation of a generated function."""
    own = isinstance(seed2, _SeedOfOperation)
    why = None
    if tf.inside_function():
        why = (
            _IN_VECTORIZED_MAP
            if _is_vectorized()
            else _SEED_IN_LOOP
            if own and in_while_loop(draws.step_graph)
            else None
        )
        if why is None:
            with tf.name_scope(name or function):
                pair = draws.seed_of_operation(seed2) if own else draws.next_seed()
                return STATELESS[function](pair, *arguments, **settings)
        draws.kept.append(_kept_operation(function, why))
    return original(*arguments, seed=seed, seed2=seed2, name=name, **settings)


def _kept(function: str, draws: StepDraws, original: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Emit the operation as it is, and note that it was used in a step."""
    if tf.inside_function():
        draws.kept.append(_kept_operation(function, _NO_STATELESS))
    return original(*arguments, **settings)


def _marked(_draws: StepDraws, get_seed: Callable[..., Any], op_seed: Any) -> Any:
    """TensorFlow's two numbers; the second is marked if the user gave the operation a seed."""
    first, second = get_seed(op_seed)
    return first, second if op_seed is None else _SeedOfOperation(second)


def _keras_generator(draws: StepDraws, original: Callable[..., Any]) -> Any:
    return _KerasGenerator(draws) if tf.inside_function() else original()


def _is_vectorized() -> bool:
    """Whether the body of tf.vectorized_map is being traced."""
    file, function = _VECTORIZING
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_code.co_filename.endswith(file):
            return True
        frame = frame.f_back
    return False


def _kept_operation(name: str, why: str) -> KeptOperation:
    return KeptOperation(name="".join(part.title() for part in name.split("_")), place=_user_line(), why=why)


def _user_line() -> str:
    """File and line of the user's code that is being traced; of its source, not of AutoGraph's copy."""
    frames = [(frame.filename, frame.lineno) for frame in reversed(tf_stack.extract_stack())]
    own = {getattr(module, "__file__", None) for name, module in list(sys.modules.items()) if _is_user_module(name)}
    places = [place for place in frames if place[0] in own]
    places += [place for place in frames if not any(part in place[0] for part in _LIBRARIES)]
    return f"{Path(places[0][0]).name}, line {places[0][1]}" if places else "unknown line"


def _is_user_module(name: str) -> bool:
    return name.startswith(USER_PACKAGE_PREFIX)
