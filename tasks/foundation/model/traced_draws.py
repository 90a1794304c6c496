"""Replaces random operations while user code is traced, so that they draw as functions of the step.

TensorFlow's functions for random numbers, layers of it and gradients of them all come to the generated functions of
`gen_random_ops`, and `keras.random` without a generator comes to one global generator. Within `exact_draws` these few
emit stateless operations with seeds from `StepDraws`. Calls outside of a traced function stay as they are.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import tensorflow as tf
from keras.src.random import seed_generator  # no public function replaces the global generator
from tensorflow.python.framework import random_seed  # the generated functions are not public
from tensorflow.python.ops import control_flow_v2_func_graphs, gen_candidate_sampling_ops, gen_image_ops, gen_random_ops
from tensorflow.python.util import tf_stack

from tasks.foundation.model.keras_steps import not_converted
from tasks.foundation.model.stateless_operations import STATELESS
from tasks.foundation.model.step_draws import KeptOperation, StepDraws
from tasks.foundation.user_errors import USER_PACKAGE_PREFIX

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
def exact_draws(draws: StepDraws | None) -> AbstractContextManager[None]:
    """Within the block, random operations that are traced take their seeds from `draws`.

    Use it around all that traces user code: `tf.function` keeps what it has traced once.

    Args:
        draws: the draws of the model's steps; None changes nothing.
    """
    return nullcontext() if draws is None else _TRACING.with_draws(draws)


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
        why = _IN_VECTORIZED_MAP if _is_vectorized() else _SEED_IN_LOOP if own and _in_loop(draws) else None
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


def _in_loop(draws: StepDraws) -> bool:
    """Whether the current graph is in a loop of the step."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and graph is not draws.step_graph:
        if isinstance(graph, control_flow_v2_func_graphs.WhileBodyFuncGraph):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


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
