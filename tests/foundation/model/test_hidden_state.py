"""A step may compute with variables, values and fixed tables; what changes beside them is refused with its line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from baton.tasks.foundation.errors import ModelError, StepFailed
from baton.tasks.foundation.model.hidden_state import captured_contents, require_no_hidden_state
from tests.support.lab import Lab, lab_of, spec_of

X = tf.TensorSpec([2], tf.float32)


def number(value: Any) -> Any:
    return tf.cast(tf.reshape(value, [-1])[:1], tf.float32)


def pairs() -> Any:
    return tf.lookup.KeyValueTensorInitializer(["b", "a"], tf.constant([2, 1], tf.int64))


def queue() -> Callable[[Any], Any]:
    waiting = tf.queue.FIFOQueue(3, tf.float32, ())
    return lambda x: x + waiting.dequeue()


def random_queue() -> Callable[[Any], Any]:
    waiting = tf.queue.RandomShuffleQueue(3, 0, tf.float32, (), seed=1)
    return lambda x: x + tf.cast(waiting.size(), tf.float32)


def iterator() -> Callable[[Any], Any]:
    numbers = iter(tf.data.Dataset.range(9))
    return lambda x: x + number(next(numbers))


def iterator_in_a_condition() -> Callable[[Any], Any]:
    numbers = iter(tf.data.Dataset.range(9))
    inner = tf.function(lambda x: x + number(numbers.get_next()))
    return lambda x: tf.cond(x[0] > 0, lambda: inner(x), lambda: x)


def dataset() -> Callable[[Any], Any]:
    numbers = tf.data.Dataset.range(9).shuffle(9, seed=1)
    return lambda x: numbers.reduce(x, lambda sum_, each: sum_ + tf.cast(each, tf.float32))


def mutable_table() -> Callable[[Any], Any]:
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)

    def count(x: Any) -> Any:
        seen = table.lookup(tf.constant(["a"]))
        table.insert(tf.constant(["a"]), seen + 1)
        return x + number(seen)

    return count


def mutable_table_that_is_read() -> Callable[[Any], Any]:
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    return lambda x: tf.while_loop(
        lambda i, _: i < 2, lambda i, x: (i + 1, x + number(table.lookup(tf.constant(["a"])))), [0, x]
    )[1]


def dense_table() -> Callable[[Any], Any]:
    table = tf.lookup.experimental.DenseHashTable(tf.string, tf.int64, -1, "", "-")
    return lambda x: x + number(table.lookup(tf.constant(["a"])))


def stage() -> Callable[[Any], Any]:
    def staged(x: Any) -> Any:
        tf.raw_ops.Stage(values=[x])
        return tf.raw_ops.Unstage(dtypes=[tf.float32])[0]

    return staged


def gradients_of_several_steps() -> Callable[[Any], Any]:
    def accumulate(x: Any) -> Any:
        sums = tf.raw_ops.ResourceConditionalAccumulator(dtype=tf.float32, shape=[2])
        return x + number(tf.raw_ops.ResourceAccumulatorNumAccumulated(handle=sums))

    return accumulate


def file_of_numbers() -> Callable[[Any], Any]:
    return lambda x: tf.data.TextLineDataset("numbers.txt").reduce(
        x, lambda sum_, line: sum_ + tf.strings.to_number(line)
    )


def clock() -> Callable[[Any], Any]:
    return lambda x: x + number(tf.timestamp())


@pytest.mark.parametrize(
    ("make", "operation"),
    [
        (queue, "QueueDequeueV2"),
        (random_queue, "QueueSizeV2"),
        (iterator, "IteratorGetNext"),
        (iterator_in_a_condition, "IteratorGetNext"),
        (dataset, "ReduceDataset"),
        (mutable_table, "LookupTableInsertV2"),
        (mutable_table_that_is_read, "LookupTableFindV2"),
        (dense_table, "LookupTableFindV2"),
        (stage, "Stage"),
        (gradients_of_several_steps, "ResourceConditionalAccumulator"),
        (file_of_numbers, "TextLineDataset"),
        (clock, "Timestamp"),
    ],
)
def test_state_that_no_checkpoint_holds_is_refused(make: Callable[[], Callable[[Any], Any]], operation: str) -> None:
    function = tf.function(make()).get_concrete_function(X)
    with pytest.raises(ModelError, match="train_step uses state that no checkpoint holds") as refused:
        require_no_hidden_state(function, "model.py:build: train_step")
    assert f"\n  {operation} (" in str(refused.value)
    assert "keep what changes in variables" in str(refused.value)


def fixed_table() -> Callable[[Any], Any]:
    table = tf.lookup.StaticHashTable(pairs(), -1)
    return lambda x: x + number(table.lookup(tf.constant(["a"])))


def fixed_table_of_the_step() -> Callable[[Any], Any]:
    return lambda x: x + number(tf.lookup.StaticHashTable(pairs(), -1).lookup(tf.constant(["a"])))


def size_of_a_fixed_table() -> Callable[[Any], Any]:
    table = tf.lookup.StaticHashTable(pairs(), -1)
    return lambda x: x + number(table.size())


def vocabulary() -> Callable[[Any], Any]:
    table = tf.lookup.StaticVocabularyTable(
        tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([0, 1], tf.int64)), 3
    )
    return lambda x: x + number(table.lookup(tf.constant(["a"])))


def summaries() -> Callable[[Any], Any]:
    writer = tf.summary.create_noop_writer()

    def written(x: Any) -> Any:
        with writer.as_default(step=1):
            tf.summary.scalar("x", x[0])
        tf.print(x)
        tf.debugging.assert_all_finite(x, "x")
        tf.debugging.assert_positive(x)
        return x

    return written


KEPT: list[Any] = []  # a graph does not keep its variables


def variables() -> Callable[[Any], Any]:
    kept, draws = tf.Variable([1.0, 2.0]), tf.random.Generator.from_seed(1)
    KEPT.extend((kept, draws))

    def used(x: Any) -> Any:
        kept.assign_add(x)
        kept.scatter_nd_add([[0]], [1.0])
        return tf.gather(kept, [0, 1]) + draws.normal([2])

    return used


def array_of_the_step() -> Callable[[Any], Any]:
    def summed(x: Any) -> Any:
        array = tf.TensorArray(tf.float32, 3)
        for index in tf.range(3):
            array = array.write(index, x)
        return tf.reduce_sum(array.stack(), axis=0)

    return summed


def dataset_of_the_step() -> Callable[[Any], Any]:
    def summed(x: Any) -> Any:
        for each in tf.data.Dataset.from_tensor_slices(x):
            x += each
        return x

    return summed


def python_code() -> Callable[[Any], Any]:
    return lambda x: tf.ensure_shape(tf.numpy_function(lambda x: x, [x], tf.float32), [2])


@pytest.mark.parametrize(
    "make",
    [
        fixed_table,
        fixed_table_of_the_step,
        size_of_a_fixed_table,
        vocabulary,
        summaries,
        variables,
        array_of_the_step,
        dataset_of_the_step,
        python_code,  # reported otherwise
    ],
)
def test_steps_without_such_state_are_accepted(make: Callable[[], Callable[[Any], Any]]) -> None:
    require_no_hidden_state(tf.function(make()).get_concrete_function(X), "model.py:build: train_step")


def test_contents_of_fixed_tables_and_tensors_are_read_in_order() -> None:
    table, matrix = tf.lookup.StaticHashTable(pairs(), -1), tf.random.stateless_uniform([200, 2], [1, 2])

    def step(x: Any) -> Any:
        inner = tf.function(lambda x: x + number(table.lookup(tf.constant(["a"]))))
        x = tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, inner(x)), [0, x])[1]
        return x + tf.gather(matrix, tf.cast(x[0], tf.int32))

    found = list(captured_contents(tf.function(step).get_concrete_function(X)))
    assert [each.what for each in found] == ["table of 2 entries", "float32[200, 2]"]
    keys, values = found[0].values
    assert (keys.tolist(), values.tolist()) == ([b"a", b"b"], [1, 2])
    assert (found[1].values[0] == matrix.numpy()).all()


MODEL = """
class Counting(keras.layers.Layer):
    def __init__(self, when):
        super().__init__()
        self.when = when
        self.table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 0)

    def call(self, x, training=False):
        if training == self.when:
            self.table.insert(tf.constant(["seen"]), self.table.lookup(tf.constant(["seen"])) + 1)
        return x


def build(when):
    model = keras.Sequential([keras.Input((6,)), Counting(when), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""


@pytest.mark.slow
def test_model_is_refused_with_its_line_before_anything_is_written(tmp_path: Path) -> None:
    lab: Lab = lab_of(tmp_path, MODEL)
    spec = spec_of("build", model__options={"when": True})
    with pytest.raises(ModelError, match=r"LookupTableInsertV2, model\.py, line \d+: self\.table\.insert"):
        lab.begin(spec)
    assert not list(lab.home(spec).files("log"))


@pytest.mark.slow
def test_state_of_the_evaluation_alone_is_refused_too(tmp_path: Path) -> None:
    lab: Lab = lab_of(tmp_path, MODEL)
    spec = spec_of("build", model__options={"when": False})
    head = lab.relay(spec, 2)
    assert head.tip is not None
    with pytest.raises(StepFailed, match="test_step uses state that no checkpoint holds"):
        lab.evaluate(spec, head.tip)
