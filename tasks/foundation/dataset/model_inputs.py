"""What a model sees of the prepared examples: transforms in the pipeline, the features after them, class weights.

Transforms run in parallel, in the order of the data. Each gets a seed, a pure function of (purpose, run's seed,
position), which is computed inside the pipeline; so the result does not depend on threads, cuts, hosts or replicas. The
position of a training example is its place in the stream of all epochs (order.py). The epoch and the example's index
within it follow from the position, so each epoch gives an example another seed.

`train.class_weight` weights the loss of each training example by its class, as Keras's `fit` does.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from baton.tasks.foundation.contracts.dataset import Feature
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.dataset.transforms import load_transform
from baton.tasks.foundation.errors import ModelError, RunFileError
from baton.tasks.foundation.model.build import preserved_global_state
from baton.tasks.foundation.text import message

Purpose = Literal["transform", "batch_transform", "validation_transform"]

_STEP = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
Parts = tuple[Any, ...]
# Takes (x,), (x, y) or (x, y, sample_weight) and a seed, int32 [2]; returns one of these forms, with static shapes.
SeededFunction = Callable[[Parts, Any], Parts]
_KEY = "train.class_weight"
_ONE_HOT_RANK = 2


def example_seeds(purpose: Purpose, seed: int, begin: Any, count: int) -> Any:
    """Return the seeds of the positions [begin, begin + count).

    The words are those of `order.hashes`; here they are computed in a graph, for positions that only it knows.

    Args:
        purpose: seeds for different purposes are independent.
        begin: int64 scalar tensor, at least 0.
        count: number of seeds.

    Returns:
        int32 tensor [count, 2] of numbers in [0, 2**31), as `tf.random.stateless_*` takes them.
    """
    start = int.from_bytes(hashlib.sha256(f"{purpose}/{seed}".encode()).digest()[:8], "little")
    index = tf.cast(begin + tf.range(1, count + 1, dtype=tf.int64), tf.uint64)
    words = _mix(index * _word(_STEP) + _word(start))
    # 31 bits each, so that signed and unsigned integers agree.
    halves = tf.bitwise.right_shift(tf.bitcast(words, tf.uint32), tf.constant(1, tf.uint32))
    return tf.cast(halves, tf.int32)


def _mix(words: Any) -> Any:
    """`order.mix`, on tensors."""
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        words = _folded(words, shift) * _word(multiplier)
    return _folded(words, 31)


def _folded(words: Any, shift: int) -> Any:
    return tf.bitwise.bitwise_xor(words, tf.bitwise.right_shift(words, _word(shift)))


def _word(value: int) -> Any:
    return tf.constant(np.uint64(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFunctions:
    """What the input pipeline applies to training data.

    Attributes:
        example: applied to each example; None: nothing.
        batch: applied to each global batch, which keeps its size; None: nothing.
    """

    example: SeededFunction | None = None
    batch: SeededFunction | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """How records become examples.

    Attributes:
        batch: vector of records [n], or what `shards.extract` returns of them -> (x,), (x, y) or
            (x, y, sample_weight), each [n, ...].
        one_by_one: decoding is slow, so each example is decoded in its own parallel call.
    """

    batch: Callable[[Any], Parts]
    one_by_one: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which examples the vectors of records hold, and which of them this host keeps.

    Attributes:
        first_example: position in the stream of the first record, a multiple of `global_batch_size`.
        chunk_batches: global batches in each vector of records.
        global_batch_size: examples per step, over all replicas.
        host: index of this host, from 0.
        hosts: number of hosts.
        local_replicas: replicas on each host.
    """

    first_example: int
    chunk_batches: int
    global_batch_size: int
    host: int
    hosts: int
    local_replicas: int

    @property
    def per_host(self) -> int:
        """Examples of this host in each global batch."""
        return self.global_batch_size // self.hosts

    def of_host(self, values: Any) -> Any:
        """Return the rows of this host from a tensor [chunk_batches * global_batch_size, ...], or a dict, in order."""
        if isinstance(values, dict):
            return values if self.hosts == 1 else {name: self.of_host(each) for name, each in values.items()}
        below = values.shape[1:]
        rows = tf.reshape(values, [self.chunk_batches, self.hosts, self.per_host, *below])[:, self.host]
        return tf.reshape(rows, [self.chunk_batches * self.per_host, *below])


def transformed_training(
    records: Any, functions: TrainingFunctions, decoding: Decoding, layout: Layout, *, seed: int
) -> Any:
    """Return per-replica batches of transformed examples.

    A batch transform needs the whole global batch. Then each host transforms all examples of the batch, and keeps its
    rows afterwards.

    Args:
        records: dataset of string vectors [chunk_batches * global_batch_size], or of what `shards.extract` returns of
            them, without end.
        functions: what to apply.
        decoding: how records become examples.
        layout: which examples the vectors hold.

    Returns:
        A dataset of (x,), (x, y) or (x, y, sample_weight), each [global_batch_size / replicas, ...].
    """
    chunk = layout.chunk_batches * layout.global_batch_size

    def seeded(begin: Any, found: Any) -> tuple[Any, Any]:
        found = tf.nest.map_structure(lambda each: tf.ensure_shape(each, [chunk, *each.shape[1:]]), found)
        seeds = example_seeds("transform", seed, begin, chunk)
        return (seeds, found) if functions.batch is not None else (layout.of_host(seeds), layout.of_host(found))

    begins = tf.data.Dataset.counter(layout.first_example, chunk)
    examples = _examples(tf.data.Dataset.zip(begins, records).map(_unconverted(seeded)), functions.example, decoding)
    per_replica = layout.per_host // layout.local_replicas
    if functions.batch is None:
        return examples.batch(per_replica, drop_remainder=True)
    transform = functions.batch
    first_row = layout.host * layout.per_host

    def transformed(index: Any, parts: Parts) -> Parts:
        changed = transform(parts, example_seeds("batch_transform", seed, index, 1)[0])
        return tuple(tf.nest.map_structure(lambda rows: rows[first_row : first_row + layout.per_host], changed))

    batches = examples.batch(layout.global_batch_size, drop_remainder=True)
    indices = tf.data.Dataset.counter(layout.first_example // layout.global_batch_size)
    return _mapped(tf.data.Dataset.zip(indices, batches), transformed).rebatch(per_replica, drop_remainder=True)


def transformed_validation(batches: Any, function: SeededFunction, *, seed: int, skip: int, batch_size: int) -> Any:
    """Return batches of transformed validation examples; an example's seed follows from its index alone.

    Args:
        batches: dataset of (x,), (x, y) or (x, y, sample_weight), each [batch_size, ...].
        function: applied to each example.
        skip: index of the first example among all validation examples.
        batch_size: examples per batch.
    """

    def seeded(begin: Any, parts: Parts) -> tuple[Any, Parts]:
        return example_seeds("validation_transform", seed, begin, batch_size), parts

    numbered = tf.data.Dataset.zip(tf.data.Dataset.counter(skip, batch_size), batches).map(_unconverted(seeded))
    examples = _mapped(numbered.unbatch(), lambda own_seed, parts: function(parts, own_seed))
    return examples.batch(batch_size, drop_remainder=True)


def _examples(pairs: Any, function: SeededFunction | None, decoding: Decoding) -> Any:
    """Return the single examples of pairs of vectors (seeds [n, 2], records [n])."""
    apply = function or (lambda parts, _seed: parts)
    if decoding.one_by_one:

        def decoded(own_seed: Any, record: Any) -> Parts:
            batch = decoding.batch(tf.nest.map_structure(lambda each: each[tf.newaxis], record))
            return apply(tuple(tf.nest.map_structure(lambda values: values[0], batch)), own_seed)

        return _mapped(pairs.unbatch(), decoded)
    parsed = _mapped(pairs, lambda seeds, records: (seeds, decoding.batch(records)))
    return _mapped(parsed.unbatch(), lambda own_seed, parts: apply(parts, own_seed))


def _mapped(dataset: Any, function: Callable[..., Any]) -> Any:
    return dataset.map(_unconverted(function), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)


def _unconverted(function: Callable[..., Any]) -> Any:
    """The function is plain Python; AutoGraph cannot convert it correctly."""
    return tf.autograph.experimental.do_not_convert(function)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """What the model trains and is evaluated on.

    Attributes:
        train: features of the training batches.
        validation: features of the validation examples.
        training_functions: transforms of the training data; None if there are none.
        validation_function: transform of the validation examples; None if there is none.
    """

    train: tuple[Feature, ...]
    validation: tuple[Feature, ...]
    training_functions: "TrainingFunctions | None" = None
    validation_function: "SeededFunction | None" = None


def model_inputs(spec: RunSpec, features: Sequence[Feature], code_folder: Path) -> ModelInputs:
    """Load and trace the transforms of the run file.

    Raises:
        ModelError: a transform cannot be used, or training and validation examples have different inputs.
    """
    data, seed = spec.data, spec.train.seed
    prepared = tuple(features)
    if data.transform is data.batch_transform is data.validation_transform is None:
        return ModelInputs(train=prepared, validation=prepared)

    example = load_transform("data.transform", data.transform, code_folder, seed=seed)
    batch = load_transform("data.batch_transform", data.batch_transform, code_folder, seed=seed)
    of_validation = load_transform("data.validation_transform", data.validation_transform, code_folder, seed=seed)
    with preserved_global_state():  # tracing gives names to layers that are not built yet
        train = prepared if example is None else example.features(prepared)
        if batch is not None:
            train = batch.features(train, batch=spec.train.global_batch_size)
        validation = prepared if of_validation is None else of_validation.features(prepared)
    if data.has_validation:
        _require_same_inputs(train, validation)
    functions = TrainingFunctions(example=example, batch=batch) if example or batch else None
    return ModelInputs(
        train=train, validation=validation, training_functions=functions, validation_function=of_validation
    )


def _require_same_inputs(train: Sequence[Feature], validation: Sequence[Feature]) -> None:
    """A model would accept bytes where it was trained on floats, and be evaluated on something else."""
    seen, evaluated = _inputs(train), _inputs(validation)
    if seen != evaluated:
        raise ModelError(
            message(
                "validation examples have other inputs than training examples after their transforms",
                details=[f"training: {seen}", f"validation: {evaluated}"],
                hints=["set data.validation_transform to a function that returns x with the training shape and dtype"],
            )
        )


def _inputs(features: Sequence[Feature]) -> str:
    inputs = [each for each in features if each.name == "x" or each.name.startswith(("x/", "x["))]
    return ", ".join(f"{each.name} {each.dtype}{list(each.shape)}" for each in inputs)


def apply_class_weight(batch: Sequence[Any], weights: Mapping[int, float] | None) -> tuple[Any, ...]:
    """Add sample weights to a training batch.

    Args:
        batch: (x,), (x, y) or (x, y, sample_weight) of NumPy arrays or tensors, [batch, ...].
        weights: weight of the loss by class; a class that is not listed has weight 1. None leaves the batch as it is.

    Returns:
        (x, y, sample_weight) with float32 [batch] weights.

    Raises:
        RunFileError: y is missing or has several parts, or the batch already has sample weights.
    """
    if weights is None:
        return tuple(batch)
    if len(batch) > 2:  # noqa: PLR2004 - x and y
        raise RunFileError(f"{_KEY}: the examples already have a sample_weight; remove one of the two")
    y = batch[1] if len(batch) > 1 else None
    if not hasattr(y, "shape"):
        found = "have no y" if y is None else f"have a y of several parts ({_names(y)})"
        raise RunFileError(f"{_KEY} needs a model with a single output; the examples {found}. Remove {_KEY}")
    return (batch[0], y, _weights_of(tf.convert_to_tensor(y), weights))


def _names(y: Any) -> str:
    return ", ".join(map(str, y)) if isinstance(y, dict) else f"{len(y)}"


def map_class_weight(dataset: Any, weights: Mapping[int, float] | None) -> Any:
    """Apply `apply_class_weight` to each batch of a `tf.data.Dataset`; the order stays."""
    if weights is None:
        return dataset
    return _mapped(dataset, lambda *batch: apply_class_weight(batch, weights)).prefetch(tf.data.AUTOTUNE)


def _weights_of(y: Any, weights: Mapping[int, float]) -> Any:
    """Return float32 [batch]. `y` has shape [batch] or [batch, 1] (labels), or [batch, classes] (one-hot)."""
    if y.shape.rank > _ONE_HOT_RANK:
        raise RunFileError(f"{_KEY} needs one label per example; y has shape {list(y.shape)}. Remove {_KEY}")
    one_hot = y.shape.rank == _ONE_HOT_RANK and y.shape[-1] != 1
    if one_hot and max(weights, default=0) >= y.shape[-1]:
        raise RunFileError(
            f"{_KEY} names class {max(weights)}, but y has shape {list(y.shape)}, which is read as one-hot labels of "
            f"{y.shape[-1]} classes; remove that class"
        )
    labels = tf.argmax(y, axis=-1) if one_hot else tf.reshape(y, [-1])
    labels = tf.cast(tf.round(labels), tf.int64)
    is_class = tf.equal(labels[:, tf.newaxis], tf.constant(list(weights), tf.int64))
    of_class = tf.reduce_sum(tf.where(is_class, tf.constant(list(weights.values()), tf.float32), 0.0), axis=-1)
    return tf.where(tf.reduce_any(is_class, axis=-1), of_class, 1.0)
