"""Random operations of a traced step are functions of the run's seed, the step and the replica."""

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.ops import gen_random_ops, random_ops

from baton.tasks.foundation.contracts.placement import AcceleratorSpec
from baton.tasks.foundation.errors import ModelError
from baton.tasks.foundation.machine.devices import acquire
from baton.tasks.foundation.model.randomness import StepDraws, exact_draws, require_exact_draws, stateful_operations

COUNT = 4000


def draws_of(seed: int = 3) -> StepDraws:
    return StepDraws(seed, acquire(AcceleratorSpec(kind="cpu"), None))


def loop_of(draws: StepDraws, work: Callable[[], Any], *, compiled: bool = False) -> Any:
    """A function of n that returns what `work` gives at each of n steps."""
    step = draws.counted(lambda _: work())

    @tf.function(jit_compile=compiled)
    def loop(n: Any) -> Any:
        with exact_draws(draws):
            return tf.map_fn(step, tf.range(n), fn_output_signature=tf.TensorSpec(None, tf.float64))

    return loop


def drawn(work: Callable[[], Any], steps: int = 4, *, start: int = 0, seed: int = 3) -> Any:
    """What `work` draws at the steps after `start`, float64 [steps, ...]."""
    tf.random.set_seed(1)
    draws = draws_of(seed)
    loop = loop_of(draws, lambda: tf.cast(work(), tf.float64))
    draws.begin_training(start)
    return loop(tf.constant(steps)).numpy()


def in_while_loop() -> Any:
    begin = (0, tf.zeros([0]))
    shapes = (tf.TensorShape([]), tf.TensorShape([None]))

    def turn(i: Any, seen: Any) -> Any:
        return i + 1, tf.concat([seen, tf.random.uniform([1])], axis=0)

    return tf.while_loop(lambda i, _: i < 5, turn, begin, shape_invariants=shapes)[1]


@tf.function
def in_function() -> Any:
    return tf.random.normal([2])


PLACES: dict[str, Callable[[], Any]] = {
    "tf.random": lambda: tf.stack([tf.random.normal([]), tf.random.normal([]), tf.random.uniform([])]),
    "keras.random": lambda: tf.concat([keras.random.normal((2,)), keras.random.uniform((2,))], axis=0),
    "while loop": in_while_loop,
    "map_fn": lambda: tf.map_fn(lambda row: row + tf.random.normal([]), tf.zeros([5])),
    "function called twice": lambda: tf.concat([in_function(), in_function()], axis=0),
    "dropout": lambda: tf.nn.dropout(tf.ones([64]), 0.5) * tf.range(1.0, 65.0),
}


@pytest.mark.parametrize("place", PLACES)
def test_draws_depend_on_the_seed_and_the_step_alone(place: str) -> None:
    work = PLACES[place]
    straight = drawn(work)
    assert np.array_equal(np.concatenate([drawn(work, 1), drawn(work, 3, start=1)]), straight)
    assert not np.array_equal(drawn(work, seed=4), straight)
    numbers = straight[straight != 0]
    assert len(set(numbers.tolist())) == len(numbers) or place == "dropout"
    assert len({row.tobytes() for row in straight}) == len(straight)


def permuted() -> Any:
    return tf.random.shuffle(tf.range(COUNT))


KINDS: dict[str, Callable[[], Any]] = {
    "normal": lambda: tf.random.normal([COUNT], 2.0, 3.0),
    "uniform": lambda: tf.random.uniform([COUNT], -1.0, 3.0, tf.float64),
    "integers": lambda: tf.random.uniform([COUNT], 3, 11, tf.int32),
    "truncated": lambda: tf.random.truncated_normal([COUNT], dtype=tf.float16),
    "parameterized": lambda: random_ops.parameterized_truncated_normal([COUNT], 1.0, 2.0, -1.0, 2.0),
    "shuffle": permuted,
    "categorical": lambda: tf.random.categorical(tf.math.log([[0.1, 0.6, 0.3]]), COUNT, dtype=tf.int32),
    "gamma": lambda: tf.random.gamma([COUNT], [0.5, 2.0], beta=3.0),
    "poisson": lambda: tf.random.poisson([COUNT], [1.5, 4.0], tf.float32),
}


@pytest.mark.parametrize("kind", KINDS)
def test_draws_have_the_distribution_of_tensorflow(kind: str) -> None:
    tf.random.set_seed(1)
    draws, work = draws_of(), KINDS[kind]
    with exact_draws(draws):
        traced = tf.function(work).get_concrete_function()
    theirs, ours = tf.function(work)(), traced()
    assert stateful_operations(traced) == ()
    assert (ours.dtype, ours.shape, traced.outputs[0].shape) == (theirs.dtype, theirs.shape, theirs.shape)
    one, other = theirs.numpy().astype(np.float64), ours.numpy().astype(np.float64)
    for statistic in (np.mean, np.std):
        assert statistic(other, axis=0 if one.shape[-1] == 2 else None) == pytest.approx(
            statistic(one, axis=0 if one.shape[-1] == 2 else None), abs=0.25, rel=0.05
        )
    assert other.min() >= {"uniform": -1, "integers": 3, "parameterized": -1}.get(kind, -np.inf)
    assert kind != "shuffle" or (sorted(other) == list(range(COUNT)) and list(other) != sorted(other))


def test_gamma_has_a_gradient_of_its_shape() -> None:
    @tf.function
    def gradient() -> Any:
        shape = tf.constant([1.0, 2.0])
        with tf.GradientTape() as tape:
            tape.watch(shape)
            total = tf.reduce_sum(tf.random.gamma([COUNT], shape))
        return tape.gradient(total, shape) / COUNT

    with exact_draws(draws_of()):
        assert gradient().numpy() == pytest.approx([1.0, 1.0], abs=0.1)  # the mean of a gamma is its shape


def test_operations_with_equal_seeds_draw_equally() -> None:
    rows = drawn(
        lambda: tf.stack([tf.random.uniform([], seed=5), tf.random.uniform([], seed=5), tf.random.uniform([])])
    )
    assert np.array_equal(rows[:, 0], rows[:, 1])
    assert not np.any(rows[:, 0] == rows[:, 2])
    assert len(set(rows[:, 0].tolist())) == len(rows)


def test_compiled_step_draws_the_same_integers() -> None:
    tf.random.set_seed(1)
    rows = []
    for compiled in (False, True):
        draws = draws_of()
        work = lambda: tf.cast(tf.random.shuffle(tf.range(9)) + tf.random.uniform([9], 0, 99, tf.int32), tf.float64)  # noqa: E731
        step = tf.function(draws.counted(lambda _: work()), jit_compile=compiled)  # noqa: B023
        draws.begin_training(5)
        with exact_draws(draws):
            rows.append([step(tf.constant(0)).numpy().tolist() for _ in range(3)])
    assert rows[0] == rows[1]


def sampled() -> Any:
    labels = tf.zeros([1, 1], tf.int64)
    return tf.random.log_uniform_candidate_sampler(labels, 1, 2, unique=True, range_max=9).sampled_candidates


KEPT: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "sampler": (sampled, ["LogUniformCandidateSampler (test_traced_draws.py, line ", "has no stateless operation"]),
    "seed in a loop": (
        lambda: tf.map_fn(lambda row: row + tf.random.normal([], seed=2), tf.zeros([5])),
        ["RandomStandardNormal (test_traced_draws.py, line ", "every turn would draw the same; leave out the seed"],
    ),
    "vectorized": (
        lambda: tf.vectorized_map(lambda row: row + tf.random.uniform([]), tf.zeros([5])),
        ["RandomUniform (test_traced_draws.py, line ", "use tf.map_fn"],
    ),
}


@pytest.mark.parametrize("kind", KEPT)
def test_operation_that_cannot_be_exact_is_refused(kind: str) -> None:
    tf.random.set_seed(1)
    work, words = KEPT[kind]
    draws = draws_of()
    with exact_draws(draws):
        traced = tf.function(work).get_concrete_function()
    with pytest.raises(ModelError) as refused:
        require_exact_draws(traced, draws, "model.py:build: train_step")
    assert [word for word in [*words, "SeedGenerator"] if word not in str(refused.value)] == []


def test_two_threads_may_trace_at_once() -> None:
    before = gen_random_ops.random_uniform
    mine, others = draws_of(), draws_of()
    entered, left = threading.Event(), threading.Event()

    def trace(draws: StepDraws) -> Any:
        return tf.function(draws.counted(lambda _: tf.random.uniform([]))).get_concrete_function(0).graph

    def trace_in_the_middle() -> None:
        with exact_draws(others):
            entered.set()
            left.wait()
            graphs.append(trace(others))

    graphs: list[Any] = []
    thread = threading.Thread(target=trace_in_the_middle)
    with exact_draws(mine):
        thread.start()
        entered.wait()
        graphs.append(trace(mine))
    left.set()
    thread.join()
    assert all(mine.are_used_by(graph) for graph in graphs)  # one counter serves the process
    assert gen_random_ops.random_uniform is before


def test_nothing_is_replaced_outside_of_the_block() -> None:
    before = gen_random_ops.random_uniform
    draws = draws_of()
    with exact_draws(draws), exact_draws(draws):
        assert gen_random_ops.random_uniform is not before
        tf.random.set_seed(1)
        one = tf.random.uniform([3]).numpy()
    tf.random.set_seed(1)
    assert np.array_equal(tf.random.uniform([3]).numpy(), one)
    assert gen_random_ops.random_uniform is before
    silent = tf.function(draws.counted(lambda _: tf.constant(1.0))).get_concrete_function(0)
    assert not draws.are_used_by(silent.graph)
