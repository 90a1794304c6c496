"""Tries the extreme values of the data on a new model: labels that it has no output for, tokens without a row.

Nothing else is known of a model's losses and layers, so they are asked: with one of the values in place of zero, the
compiled loss must not fail and not be NaN. Nothing is looked at if zeros fail too, or if code of the user's stands
between the values and the model: an own train step, or a transform.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tasks.foundation.accelerator.strategy import DEVICE_LOST_ERRORS
from tasks.foundation.contracts.dataset import DatasetRef, ExtremeValue, Feature
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.dataset.evaluation_sets import place_of_set
from tasks.foundation.dataset.features import unflatten, zeros
from tasks.foundation.dataset.manifest import load_manifest, plain_datasets
from tasks.foundation.errors import ModelError
from tasks.foundation.messages import message
from tasks.foundation.model.batch_shapes import has_fixed_batch_size
from tasks.foundation.model.build import compute_loss
from tasks.foundation.model.keras_steps import overrides
from tasks.foundation.state.held_values import HeldValues
from tasks.foundation.state.train_state import TrainState
from tasks.foundation.storage.base import Storage
from tasks.foundation.user_errors import describe

Extremes = tuple[tuple[Feature, ...], tuple[ExtremeValue, ...]]


def extremes_of(spec: RunSpec, dataset: DatasetRef, storage: Storage) -> Iterator[Extremes]:
    """Yield the features and the extreme values of each dataset that a run reads without a transform.

    Args:
        spec: the run file.
        dataset: the prepared dataset.
        storage: the storage root.
    """
    data = spec.data
    if data.transform is data.batch_transform is None:
        for _, manifest in plain_datasets(storage, load_manifest(storage, dataset), dataset.folder):
            yield manifest.features, manifest.extremes
    for name in data.own_sets if data.validation_transform is None else ():
        if dataset.own_set(name) is not None:  # the doctor has a sample of the training data only
            manifest = load_manifest(storage, place_of_set(dataset, name)[0])
            yield manifest.features, manifest.extremes


def require_extremes(state: TrainState, extremes: Iterable[Extremes], *, reference: str, size: int) -> None:
    """Refuse a model that cannot be trained on a value of its data.

    Args:
        state: of the model; its values stay as they are.
        extremes: see `extremes_of`.
        reference: the function's name in the run file, for messages.
        size: number of examples in a batch of one replica.

    Raises:
        ModelError: names the value, its example, and the outputs of the model.
    """
    model = state.model
    if overrides(model, "train_step"):
        return
    held = HeldValues(leaf for leaf in state.model_leaves if not (leaf.trainable or leaf.path.startswith("optimizer/")))
    with state.accelerator.strategy.scope():
        try:
            for features, values in extremes:
                tried = _Tried(model, features, size=size if has_fixed_batch_size(model) else 1)
                for value in values:
                    if fault := tried.fault_of(value):
                        raise ModelError(_words(value, fault, reference, tried.outputs))
        finally:
            held.put_back()


class _Tried:
    """One model, with batches of zeros in which one feature has another value."""

    def __init__(self, model: keras.Model, features: Sequence[Feature], *, size: int) -> None:
        self._model = model
        self._zeros = {feature.name: zeros((size, *feature.shape), feature.dtype) for feature in features}
        self.outputs = ""
        self._predicted: Any = None
        self._usable = not self._fault(self._zeros)

    def fault_of(self, value: ExtremeValue) -> str:
        """Why the model cannot be trained on a value; "" if it can be, or nothing is known."""
        known = self._zeros.get(value.feature)
        if not self._usable or known is None or value.value == 0:
            return ""
        return self._fault({**self._zeros, value.feature: np.full_like(known, value.value)})

    def _fault(self, arrays: dict[str, Any]) -> str:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(unflatten(arrays))
        of_labels = self._predicted is not None and all(
            arrays[name] is array for name, array in self._zeros.items() if not name.startswith("y")
        )
        try:
            predicted = self._predicted if of_labels else self._model(x, training=False)
            loss = None if y is None else compute_loss(self._model, x, y, predicted, sample_weight)
        except DEVICE_LOST_ERRORS:
            raise
        except tf.errors.OpError as fault:
            return describe(fault)
        except (Exception, SystemExit):  # noqa: BLE001 - the loss needs something else, so nothing is known
            return "" if self._predicted is not None else "unknown"
        if self._predicted is None:
            self._predicted = predicted
            self.outputs = ", ".join(map(_shape_words, tree.flatten(predicted)))
        return "the loss is NaN" if loss is not None and bool(np.isnan(loss).any()) else ""


def _words(value: ExtremeValue, fault: str, reference: str, outputs: str) -> str:
    where = f"{value.where}: {value.feature} is {value.value}"
    if value.feature.startswith("y"):
        return message(
            f"{where}, and the loss of {reference}, whose output is {outputs}, cannot be computed with it: {fault}",
            hints=["correct the label, or give the model an output for it; classes are numbered from 0"],
        )
    return message(
        f"{where}, which {reference} cannot take: {fault}",
        hints=["correct the value, or give the layer more rows, as Embedding(input_dim=...)"],
    )


def _shape_words(output: Any) -> str:
    return f"{keras.backend.standardize_dtype(output.dtype)}[{', '.join(['batch', *map(str, output.shape[1:])])}]"
