"""What `fit` would draw or change anew in each epoch, and what is read here once, before the training.

A user who augments in `Dataset.map`, in a generator or in a `PyDataset` gets one augmentation, the same in each epoch.
That is said by name and line: random operations are found in the functions of a `tf.data.Dataset`, and draws of Python
code by the states of the random generators, which one call is traced for. A `PyDataset` that defines `on_epoch_end` or
`on_epoch_begin` may only shuffle. So after its pass these are called as `fit` calls them, and some of its batches are
read again: examples that the first pass did not have are refused.
"""

import functools
import hashlib
import inspect
import random
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import GeneratorType
from typing import Any

import numpy as np

from baton.tasks.foundation.text import counted
from baton.tasks.foundation.user_traceback import USER_PACKAGE_PREFIX, UserFrame, is_user_file
from baton.tasks.prepare_data.sources.source import LocatedExample, Row

TRANSFORM = "what is random belongs into data.transform: augment(example, *, seed)"
_SAME = f"so every epoch has the same; {TRANSFORM}"
_HOOKS = ("on_epoch_end", "on_epoch_begin")
# Operations that move the state of a `tf.random.Generator` on, and that change variables.
_MOVING = ("RngReadAndSkip", "RngSkip")
_CHANGING = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
# Lines of one call after which the search for a draw is given up: each costs some microseconds.
_MOST_LINES = 20_000
_WRITTEN_BITS = 64
_WATCHED_CALLS = range(2, 13)


def draws_of_dataset(dataset: Any, *, order_counts: bool) -> Iterator[str]:
    """Yield what a `tf.data.Dataset` does anew in each pass, in words; nothing from before a `cache()`.

    Args:
        order_counts: whether another order of the same examples is another pass.
    """
    seen: set[int] = set()
    found: dict[str, None] = {}
    waiting = [(dataset, order_counts)]
    while waiting:
        each, counts = waiting.pop()
        if id(each) in seen or "Cache" in type(each).__name__:
            continue
        seen.add(id(each))
        name = type(each).__name__
        if counts and "Shuffle" in name and getattr(each, "_reshuffle_each_iteration", True) is not False:
            found["shuffles anew in each pass, which decides the examples or their order"] = None
        for function in each._functions():
            found |= dict.fromkeys(_changes_of(getattr(function, "function", function)))
        # What is taken of a shuffled dataset is another part in each pass.
        counts = counts or any(word in name for word in ("Take", "Skip", "Shard"))
        waiting += [(source, counts) for source in each._inputs()]
    yield from (f"the tf.data.Dataset {words}, and it is read once, {_SAME}" for words in found)


def _changes_of(concrete: Any) -> Iterator[str]:
    """Yield what a function of a dataset does anew in each pass, in words, with its lines."""
    from baton.tasks.foundation.model.keras_steps import line_that_made
    from baton.tasks.foundation.model.randomness import RANDOM_KERNELS, nodes_of

    kinds = {*RANDOM_KERNELS, *_MOVING, *_CHANGING}
    found = {node.op for node in nodes_of(concrete)}
    if not found & kinds:
        return
    # Keras's layers draw with stateless operations from a seed in a variable, which they change.
    draws = found & {*RANDOM_KERNELS, *_MOVING} or any(kind.startswith("StatelessRandom") for kind in found)
    verb = "draws random numbers" if draws else "changes a variable"
    operations = concrete.graph.get_operations()
    # Inside a condition or a function that is called, the call is the user's line.
    makers = [each for each in operations if each.type in kinds] or [
        each for each in operations if each.type.endswith(("PartitionedCall", "If", "While", "Case", "Dataset"))
    ]
    lines = dict.fromkeys(filter(None, map(line_that_made, makers)))
    yield from (f"{verb} ({line.removeprefix(', ')})" for line in lines or [", ".join(sorted(found & kinds))])


class DrawWatch:
    """Notices that a function which gives an example draws random numbers, and finds the user's line.

    The first call is left out, because it may draw an order of the examples. Some of the others are measured, until one
    draws; then one is traced. Calls may overlap, in threads of TensorFlow.
    """

    def __init__(self, reference: str, warn: Callable[[str], None], *, owner: object = None) -> None:
        """Nothing has been called yet.

        Args:
            reference: the user's function, for messages.
            warn: receives the warning, once.
            owner: an object whose attributes may be random generators that outlive a pass; or a generator, whose
                variables may be random generators without a seed.
        """
        self._reference = reference
        self._warn = warn
        self._owner = owner
        self._calls = 0
        self._draws = False
        self.warned = False

    def call(self, function: Callable[..., Any], *given: Any, **more: Any) -> Any:
        """Call a function, and return what it returns."""
        self._calls += 1
        if self.warned or self._calls not in _WATCHED_CALLS:
            return function(*given, **more)
        if not self._draws:
            before = _states(self._owner)
            returned = function(*given, **more)
            self._draws = _states(self._owner) != before
            return returned
        finder = _LineFinder(self._owner)
        with finder.tracing():
            returned = function(*given, **more)
        if finder.found is not None and not self.warned:
            self.warned = True
            line = f"{finder.found.place()}: {finder.found.text()}"
            self._warn(f"{self._reference}: draws random numbers ({line}), and it is read once, {_SAME}")
        return returned

    def items(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of an iterable, each made by a call."""
        iterator = iter(items)
        self._owner = iterator if self._owner is None else self._owner
        while True:
            try:
                item = self.call(next, iterator)
            except StopIteration:
                return
            yield item

    @contextmanager
    def of_tf_data(self) -> Iterator[None]:
        """Within the block, Python code that becomes part of a `tf.data.Dataset` is watched too.

        TensorFlow calls it in threads of its own, where nothing else could find its lines.
        """
        import tensorflow as tf

        def generator(function: Callable[..., Any], *given: Any, **more: Any) -> Any:
            watch = DrawWatch(self._reference, self._warn)
            return from_generator(lambda *arguments: watch.items(function(*arguments)), *given, **more)

        def called(name: str) -> Callable[..., Any]:
            original = getattr(tf, name)

            def watched(func: Callable[..., Any], *given: Any, **more: Any) -> Any:
                watch = DrawWatch(self._reference, self._warn)
                return original(functools.partial(watch.call, func), *given, **more)

            return watched

        from_generator = tf.data.Dataset.from_generator
        names = ("numpy_function", "py_function")
        originals = {name: getattr(tf, name) for name in names}
        tf.data.Dataset.from_generator = staticmethod(generator)
        for name in names:
            setattr(tf, name, called(name))
        try:
            yield
        finally:
            tf.data.Dataset.from_generator = staticmethod(from_generator)
            for name, original in originals.items():
                setattr(tf, name, original)


class _LineFinder:
    """Traces a call of the user's code, and notes the first line that moves a random generator on."""

    def __init__(self, owner: object) -> None:
        self._owner = owner
        self._before = _states(owner)
        self._last: UserFrame | None = None
        self._left = _MOST_LINES
        self.found: UserFrame | None = None

    @contextmanager
    def tracing(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(before)

    def _enter(self, frame: Any, _event: str, _value: Any) -> Any:
        return self._look if self._left and is_user_file(frame.f_code.co_filename) else None

    def _look(self, frame: Any, event: str, _value: Any) -> Any:
        if self.found is not None or not self._left:
            return None
        self._left -= 1
        if self._last is not None and _states(self._owner) != self._before:
            self.found = self._last
            return None
        if event == "line":
            self._last = UserFrame(frame.f_code.co_filename, frame.f_lineno, "")
        return self._look


def _states(owner: object) -> tuple[Any, ...]:
    """The states of the random generators that give other numbers in another pass.

    They are those of the process, of the user's modules and of `owner`, see `DrawWatch`.
    """
    from keras.src.backend.common import global_state  # no public call gets Keras's global seed generator

    from baton.tasks.foundation.model.build import RandomStates

    now = RandomStates.now()
    holders = [module for name, module in list(sys.modules.items()) if name.startswith(USER_PACKAGE_PREFIX)]
    values = [value for holder in (*holders, owner) for value in list(getattr(holder, "__dict__", {}).values())]
    if isinstance(owner, GeneratorType) and owner.gi_frame is not None:
        values += filter(_is_unseeded, owner.gi_frame.f_locals.values())
    values.append(global_state.get_global_attribute("global_seed_generator"))
    own = (state for value in values for state in _states_of(value))
    return now.python, _of_numpy(now.numpy), now.keras_drawn, now.tensorflow_drawn, *own


def _is_unseeded(value: object) -> bool:
    """Whether a value is `np.random.default_rng()`: 128 bits seed it, which are no number that a person writes."""
    if not isinstance(value, np.random.Generator):
        return False
    entropy = getattr(getattr(value.bit_generator, "seed_seq", None), "entropy", None)
    return isinstance(entropy, int) and entropy.bit_length() > _WRITTEN_BITS


def _states_of(value: Any) -> Iterator[object]:
    """Yield the state of a random generator, or those that a Keras layer draws from."""
    import keras

    if isinstance(value, random.Random):
        yield value.getstate()
    elif isinstance(value, np.random.Generator):
        yield str(value.bit_generator.state)
    elif isinstance(value, np.random.RandomState):
        yield _of_numpy(value.get_state())
    elif type(value).__name__ in {"Generator", "SeedGenerator"} and hasattr(value, "state"):  # of TensorFlow and Keras
        yield np.asarray(value.state).tobytes()
    elif isinstance(value, keras.Layer):
        yield from (np.asarray(each).tobytes() for each in value.variables if each.name == "seed_generator_state")


def _of_numpy(state: Any) -> tuple[object, ...]:
    _name, words, *others = state
    return words.tobytes(), *others


class SecondPass:
    """Compares the begin of a second pass over a `PyDataset` with the first one.

    Attributes:
        hooks: the methods by which the dataset may change between epochs, in words; "" if it has none of its own.
    """

    def __init__(self, dataset: Any) -> None:
        """Nothing has been read yet."""
        import keras

        self._dataset = dataset
        kind = type(dataset)
        own = [name for name in _HOOKS if getattr(kind, name) is not getattr(keras.utils.PyDataset, name)]
        self.hooks = " and ".join(f"{name} ({_place_of(getattr(kind, name))})" for name in own)
        self._seen = array("Q")

    def first(self, examples: Iterable[LocatedExample]) -> Iterator[LocatedExample]:
        """Yield the examples of the first pass, and note what they are."""
        for where, example in examples:
            if self.hooks:
                self._seen.append(_digest(example))
            yield where, example

    def difference(
        self,
        count: int,
        length: Callable[[], int | None],
        rows: Callable[[Sequence[int]], Iterator[LocatedExample]] | None,
        *,
        order_counts: bool,
    ) -> str:
        """Return how a second epoch differs, in words; "" if it has the same examples.

        Args:
            count: batches of the first pass.
            length: returns the number of batches now.
            rows: reads the batches with these numbers; None: examples are not compared.
            order_counts: whether another order of the same examples is a difference.
        """
        again = length()
        if again != count:
            return f"its first epoch has {counted(count, 'batch', 'batches')}, the second {again}"
        if rows is None:
            return ""
        first, known = self._seen, np.unique(np.frombuffer(self._seen, np.uint64))
        for number in sorted({0, count // 2, count - 1}):
            found = [_digest(example) for _, example in rows([number])]
            if not np.isin(np.array(found, np.uint64), known).all():
                return f"batch {number} of its second epoch has examples that the first has not"
            if order_counts and number == 0 and found != first[: len(found)].tolist():
                return "its second epoch has another order, and data.shuffle: false keeps that of the first"
        return ""


def _digest(example: object) -> int:
    arrays = example.arrays if isinstance(example, Row) else {}
    found = hashlib.blake2b(digest_size=8)
    for name, value in arrays.items():
        data = repr(value.tolist()).encode() if value.dtype == object else value.tobytes()
        found.update(f"{name} {value.dtype} {value.shape} {len(data)}".encode() + data)
    return int.from_bytes(found.digest(), "little")


def _place_of(function: Any) -> str:
    code = inspect.unwrap(function).__code__
    return UserFrame(code.co_filename, code.co_firstlineno, "").place()
