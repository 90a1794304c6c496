"""Sums of three or more floats have the same bits, whichever thread finishes first."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from baton.tasks.foundation.contracts.log_entry import SegmentResult
from baton.tasks.foundation.model.sums import fix_sum_order, unordered_sums
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from tests.support.lab import Lab, in_fresh_process, lab_of, restored, spec_of

# Each sum has two terms that something else reads, and a last one that nothing else reads. If the readers are slow,
# AddN can reuse the memory of the last one only; if the last one is slow, it can reuse that of the first.
MODEL = """
import os
import time


def slowly(value, who):
    def wait(number):
        time.sleep(0.05 if os.environ["BATON_TEST_SLOW"] == who else 0.0)
        return number + 0.0  # a copy: TensorFlow keeps what is returned for a while

    # Stateless, so that no call waits for another one.
    return tf.ensure_shape(tf.numpy_function(wait, [value], tf.float32, stateful=False), value.shape)


class Summing(keras.Model):
    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(64,), initializer="random_normal", name="scale")
        self.sums = [self.add_weight(shape=(64,), trainable=False, name=f"sums_{number}") for number in range(2)]

    def call(self, x):
        return x * self.scale[:6]

    def read(self, value, number):
        self.sums[number].assign_add(slowly(value, "readers"))

    def total(self):
        first, second = tf.exp(self.scale), tf.cos(self.scale)
        self.read(first, 0)
        self.read(second, 1)
        total = first + (second + tf.exp(slowly(self.scale * 0.3, "last")))
        return tf.reduce_mean(tf.sin(1e4 * total))

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(self(x)))
        self.optimizer.apply_gradients([(tape.gradient(loss, self.scale), self.scale)])
        return {"total": self.total()}

    def test_step(self, x):
        return {"total": self.total()}


def summing():
    model = Summing()
    model.compile("sgd")
    return model
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    PROCESS_STATE.forget()
    yield lab_of(tmp_path, MODEL)
    PROCESS_STATE.forget()


def test_sums_do_not_depend_on_which_thread_is_first(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("summing", form="alone", train__log_every_steps=1)
    monkeypatch.setitem(os.environ, "BATON_TEST_SLOW", "nobody")
    start = lab.begin(spec).tip
    assert start is not None
    trained: list[SegmentResult] = []
    for who in ("readers", "last"):
        monkeypatch.setitem(os.environ, "BATON_TEST_SLOW", who)
        trained.append(lab.train(spec, start, 2))
    one, other = trained
    assert one.staged is not None
    assert other.staged is not None
    assert one.history == other.history
    assert one.staged.state_digest == other.staged.state_digest


def test_validation_adds_as_the_model_is_written(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("summing", form="alone")
    monkeypatch.setitem(os.environ, "BATON_TEST_SLOW", "nobody")
    start = lab.begin(spec).tip
    assert start is not None
    # Without a graph, TensorFlow adds as the model is written. In another order, the sine differs in its fourth digit.
    expected = float(restored(lab, spec, start).model.total())
    assert lab.evaluate(spec, start) == {"total": pytest.approx(expected, rel=1e-5)}


def traced(work: Callable[..., Any], *shapes: tuple[int | None, ...], dtype: Any = tf.float32) -> Any:
    return tf.function(work).get_concrete_function(*(tf.TensorSpec(shape, dtype) for shape in shapes))


SAME = ((4,), (4,), (4,))


@pytest.mark.parametrize(
    ("work", "shapes", "sums"),
    [
        (lambda a, b, c: tf.add_n([a, b, c]), SAME, 1),
        (lambda a, b, c: a + (b + c), SAME, 2),
        (lambda a, b, c: tf.add_n([a + b, c]), SAME, 2),
        (lambda a, b, c: tf.identity(a + b) + c, SAME, 2),
        # A mean of a scalar, and a product with 1, change nothing, and TensorFlow removes them.
        (lambda a, b, c: a + tf.reduce_mean(b + c), ((), (), ()), 2),
        (lambda a, b, c: a + (b + c) * tf.ones_like(a), SAME, 2),
        (lambda a, b, c: a + (b + c) * c, SAME, 0),
        (lambda a, b, c: a + (b + c), ((None,), (4,), (4,)), 2),
        (lambda a, b, _: a + b, SAME, 0),
        # TensorFlow joins terms of one shape only.
        (lambda a, b, c: a + (b + c), ((4,), (4,), ()), 0),
        # A sum that is used twice is no part of another one.
        (lambda a, b, c: ((a + b) + c, tf.exp(a + b)), SAME, 0),
        # The second one is computed only once: TensorFlow joins them.
        (lambda a, b, c: (tf.stop_gradient(a + b) + c, tf.shape(a + b)), SAME, 2),
    ],
)
def test_sums_of_three_or_more_are_found(work: Callable[..., Any], shapes: tuple[Any, ...], sums: int) -> None:
    assert len(unordered_sums(traced(work, *shapes).graph)) == sums


def test_integers_are_added_in_any_order() -> None:
    assert unordered_sums(traced(lambda a, b, c: tf.add_n([a, b, c]), *SAME, dtype=tf.int32).graph) == frozenset()


def test_gradients_of_a_value_used_three_times_are_found() -> None:
    def work(a: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(a)
            loss = tf.reduce_sum(tf.sin(a)) + tf.reduce_sum(tf.cos(a) * tf.tanh(a))
        return tape.gradient(loss, a)

    assert len(unordered_sums(traced(work, (4,)).graph)) == 1


def test_sums_inside_of_functions_and_loops_are_fixed() -> None:
    @tf.function
    def inner(a: Any, b: Any) -> Any:
        return a + b

    def work(a: Any, b: Any, c: Any) -> Any:
        total = tf.zeros_like(a)
        for _ in tf.range(2):
            total = tf.cond(tf.reduce_sum(a) > 0, lambda: tf.add_n([a, b, c]), lambda: inner(a, b) + c)
        return total

    function = traced(work, *SAME)
    # The AddN; the sum with what `inner` returns, and the one inside.
    assert len(fix_sum_order(function, tf.distribute.get_strategy())) == 3
    assert function(*(tf.fill([4], each) for each in (0.1, 0.2, 0.3))).numpy() == pytest.approx(0.6)


def test_older_functions_of_a_graph_are_read_too() -> None:
    """`tf.nn.ctc_loss` makes functions that have a definition and no graph."""
    logits = tf.random.stateless_normal([2, 5, 4], [1, 2])
    labels, lengths = tf.constant([[1, 2], [2, 0]]), (tf.constant([2, 1]), tf.constant([5, 4]))

    def gradient(values: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(values)
            loss = tf.nn.ctc_loss(labels, values, *lengths, logits_time_major=False, blank_index=0)
        return loss, tape.gradient(loss, values)

    plain = tf.function(gradient)(logits)
    concrete = tf.function(gradient).get_concrete_function(tf.TensorSpec([2, 5, 4]))
    assert any(not hasattr(each, "graph") for each in concrete.graph._functions.values())
    assert "add_1" in fix_sum_order(concrete, tf.distribute.get_strategy())
    for found, expected in zip(concrete(logits), plain, strict=True):
        tf.debugging.assert_near(found, expected)


def dump_optimized(folder: str) -> None:
    """Run functions, called and inlined, and write their graphs as TensorFlow has optimized them into a folder."""
    os.environ |= {"TF_DUMP_GRAPH_PREFIX": folder, "TF_DUMP_GRAPH_NAME_FILTER": "*", "TF_DUMP_GRAPH_GROUPS": "main"}

    def work(values: Any) -> Any:
        # Larger than TensorFlow's estimate of a CPU's memory; nothing writes into it.
        large = tf.raw_ops.Empty(shape=[80_000_000], dtype=tf.float32)
        total = tf.add_n([tf.exp(values), tf.sin(values), tf.cos(values)])
        with tf.control_dependencies([total]):
            return total, large[0]

    inlined, called = tf.function(work), tf.function(work, experimental_attributes={"_noinline": True})
    function = tf.function(lambda values: (inlined(values), called(values))).get_concrete_function(tf.TensorSpec([8]))
    fix_sum_order(function, tf.distribute.get_strategy())
    function(tf.zeros([8]))


def test_sums_of_functions_larger_than_the_memory_stay_whole(tmp_path: Path) -> None:
    """Otherwise each term is added to a variable, in the order in which threads finish."""
    in_fresh_process(dump_optimized, folder=str(tmp_path))
    optimized = [file.read_text(encoding="utf-8") for file in tmp_path.glob("*after_graph_optimization*")]
    assert all('op: "AddN"' in text for text in optimized)
    assert [text for text in optimized if "TemporaryVariable" in text] == []
    assert len(optimized) == 2  # the function, and the one that is called
