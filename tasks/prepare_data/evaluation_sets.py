"""Prepares the own validation and test sets of a run file: each is a dataset of its own, of which nothing is held out.

So a changed test set leaves the training data and the run as they are, and runs that name the same set share it.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tasks.foundation.contracts.dataset import DatasetRef, Feature, Reading
from tasks.foundation.contracts.evaluation_sets import SetName, SetRef
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.dataset.manifest import load_manifest
from tasks.foundation.errors import SourceError
from tasks.foundation.messages import message
from tasks.foundation.stage import Place
from tasks.prepare_data.first_example import Kinds, features_of_first_example, kinds_of, words_of
from tasks.prepare_data.set_names import errors_of_set

Prepare = Callable[[RunSpec, Place], DatasetRef]

# Keras takes examples with and without weights, so a set need not have those of the training examples.
_OPTIONAL = "sample_weight"


def prepare_with_own_sets(spec: RunSpec, place: Place, prepare: Prepare) -> DatasetRef:
    """Prepare the dataset of a run file, and its own sets.

    Before a new dataset is written, the first example of each set is compared with the first training example.

    Args:
        spec: the run file.
        place: where the data is prepared; `check_features` is called for the training examples.
        prepare: prepares one dataset.

    Returns:
        The dataset, with references to its own sets.

    Raises:
        SourceError: the examples of a set have other features than the training examples.
        BatonError: a dataset cannot be prepared, see `prepare`.
    """
    names = tuple(spec.data.own_sets)
    if not names:
        return prepare(spec, place)

    def check(features: tuple[Feature, ...], reading: Reading) -> None:
        if place.check_features is not None:
            place.check_features(features, reading)
        for name in names:
            require_features_of_training(name, first_features(spec, name, place.code_folder), features)

    dataset = prepare(spec, dataclasses.replace(place, check_features=check))
    features = load_manifest(place.root, dataset).features
    found: dict[SetName, SetRef] = {}
    for name in names:
        with errors_of_set(name):
            own = prepare(spec_of_set(spec, name), dataclasses.replace(place, check_features=None))
        require_features_of_training(name, load_manifest(place.root, own).features, features)
        found[name] = SetRef(folder=own.folder, content_digest=own.content_digest, examples=own.train_examples)
    return _with_sets(dataset, found)


def spec_of_set(spec: RunSpec, name: SetName) -> RunSpec:
    """Return the run file of a dataset that consists of an own set alone.

    Its seed is that of the set. With `train.seed`, runs with other seeds would be evaluated on other examples where the
    source draws random numbers; and a source that draws its training examples too would repeat them in the set.
    """
    train = spec.train.model_copy(update={"seed": _seed_of(name)})
    return spec.model_copy(update={"data": spec.data.of_set(name), "train": train})


def _seed_of(name: SetName) -> int:
    return int.from_bytes(hashlib.sha256(f"{name} set".encode()).digest()[:4], "little") >> 1


def first_features(spec: RunSpec, name: SetName, code_folder: Path) -> tuple[Feature, ...]:
    """Return the features of the first example of a set, which is read and not written.

    Args:
        spec: the run file.
        name: the set.
        code_folder: the run file's folder.

    Raises:
        SourceError: the set is missing or empty, or its first example is invalid.
        RunFileError: its source or an option cannot be used.
    """
    with errors_of_set(name):
        return features_of_first_example(spec_of_set(spec, name), code_folder)


def require_features_of_training(name: SetName, features: Sequence[Feature], training: Sequence[Feature]) -> None:
    """Refuse a set whose examples the model cannot take.

    Args:
        name: the set.
        features: of its examples.
        training: of the training examples.

    Raises:
        SourceError: names, dtypes or shapes differ; sample weights may be missing on either side.
    """
    own, others = _kinds(features), _kinds(training)
    if own == others:
        return
    raise SourceError(
        message(
            f"data.{name}: its examples differ from the training examples",
            details=[f"data.{name}: {words_of(own)}", f"training: {words_of(others)}"],
            hints=["give both the same names, dtypes and shapes; shapes are of one example, without a batch dimension"],
        )
    )


def _kinds(features: Sequence[Feature]) -> Kinds:
    return {name: kind for name, kind in kinds_of(features).items() if name != _OPTIONAL}


def _with_sets(dataset: DatasetRef, sets: Mapping[SetName, SetRef]) -> DatasetRef:
    validation = sets.get("validation")
    held_out = dataset.validation_examples if validation is None else validation.examples
    return dataset.model_copy(
        update={"validation": validation, "test": sets.get("test"), "validation_examples": held_out}
    )
