"""Own validation and test sets: datasets of their own, checked before anything is written."""

from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.contracts.data_spec import DataSpec
from baton.tasks.foundation.dataset.evaluation_sets import set_batches, set_remainder
from baton.tasks.foundation.dataset.manifest import read_manifest
from baton.tasks.foundation.errors import RunFileError, SourceError
from baton.tasks.prepare_data.split import settings_of_split
from tests.prepare_data.conftest import Workshop

CODE = """
import numpy as np

def load(n=40):
    for number in range(n):
        yield np.full(3, number, np.float32), number

def load_validation(first=100, n=11):
    for number in range(first, first + n):
        yield np.full(3, number, np.float32), number

def load_wide():
    yield np.zeros(4, np.float32), 1

def load_weighted():
    yield np.zeros(3, np.float32), 7, np.float32(2)

def load_nothing():
    yield from ()

def load_labelled():
    yield np.zeros(3, np.float32), 9

def load_groups():
    for number in range(60):
        yield {"signal": np.full(3, number, np.float32), "user_id": number % 12}, number

def load_random(n=8):
    for number in range(n):
        yield np.random.normal(size=3).astype(np.float32), number
"""
VALIDATION = {"source": "data.py:load_validation"}


@pytest.fixture
def coded(workshop: Workshop) -> Workshop:
    workshop.write("data.py", CODE)
    return workshop


def labels_on(workshop: Workshop, ref: Any, on: Any, batch_size: int = 4) -> list[int]:
    full = [y for _, y in set_batches(workshop.storage, ref, on=on, batch_size=batch_size).as_numpy_iterator()]
    rest = set_remainder(workshop.storage, ref, on=on, batch_size=batch_size)
    rests = [] if rest is None else [y for _, y in rest.as_numpy_iterator()]
    return sorted(np.concatenate([*full, *rests]).tolist())


def test_each_example_of_an_own_set_is_read_once(coded: Workshop) -> None:
    test = {"source": "data.py:load_validation", "options": {"first": 500, "n": 3}}
    ref = coded.prepare("data.py:load", validation=VALIDATION, test=test)
    assert (ref.train_examples, ref.validation_examples) == (40, 11)
    assert labels_on(coded, ref, "validation") == list(range(100, 111))
    assert labels_on(coded, ref, "test") == [500, 501, 502]
    assert sorted(coded.labels(ref)) == list(range(40))


def test_training_data_does_not_depend_on_the_sets(coded: Workshop) -> None:
    plain = coded.prepare("data.py:load", validation_fraction=0.0)
    before = coded.files()
    with_sets = coded.prepare("data.py:load", validation=VALIDATION, test=VALIDATION)
    assert with_sets.folder == plain.folder
    assert with_sets.content_digest == plain.content_digest
    assert labels_on(coded, with_sets, "validation") == labels_on(coded, with_sets, "test")
    assert {path: time for path, time in coded.files().items() if path in before} == before
    held_out = coded.prepare("data.py:load", test=VALIDATION)
    assert held_out.folder == coded.prepare("data.py:load").folder
    assert held_out.validation is None
    assert held_out.examples_of("validation") == held_out.validation_examples > 0


def test_preparing_own_sets_twice_writes_nothing(coded: Workshop) -> None:
    first = coded.prepare("data.py:load", validation=VALIDATION)
    before = coded.files()
    again = coded.prepare("data.py:load", validation=VALIDATION)
    assert coded.files() == before
    assert again.already_prepared
    assert (again.validation, again.folder) == (first.validation, first.folder)


def test_random_training_examples_are_the_same_with_a_set(coded: Workshop) -> None:
    alone = coded.prepare("data.py:load_random", validation_fraction=0.0)
    digest = alone.content_digest
    for path in list(coded.storage.files(alone.folder)):
        coded.storage.delete(path)
    random_set = {"source": "data.py:load_random", "options": {"n": 3}}
    assert coded.prepare("data.py:load_random", validation=random_set).content_digest == digest


def test_random_examples_of_a_set_are_its_own(coded: Workshop) -> None:
    def first_inputs(dataset: Any) -> list[Any]:
        return sorted(x.tolist() for batch, _ in dataset.as_numpy_iterator() for x in batch)

    same = {"source": "data.py:load_random"}
    refs = [coded.prepare("data.py:load_random", validation=same, test=same, seed=seed) for seed in (0, 1)]
    assert refs[0].content_digest != refs[1].content_digest
    assert (refs[0].validation, refs[0].test) == (refs[1].validation, refs[1].test)
    sets = [first_inputs(set_batches(coded.storage, refs[0], on=on, batch_size=8)) for on in ("validation", "test")]
    training = sorted(example["x"].tolist() for example in coded.examples(refs[0]))
    assert len({str(each) for each in (*sets, training)}) == 3


@pytest.mark.parametrize("name", ["validation", "test"])
@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("data.py:load_wide", SourceError, r"data.{name}: its examples differ .*x float32\[4\].*x float32\[3\]"),
        ("data.py:load_nothing", SourceError, r"data.{name}.source: data.py:load_nothing: it has no examples"),
        ("data.py:missing", SourceError, r"data.{name}.source: .*missing"),
        ({"source": "npz", "options": {"path": "no.npz"}}, SourceError, "no.npz"),
        ({"source": "npz", "options": {"paht": "no.npz"}}, RunFileError, r"data.{name}.options.paht: 'no.npz'"),
        (
            {"source": "data.py:load", "options": {"m": 1}},
            RunFileError,
            "data.{name}.options.m: 1: .*no such param",
        ),
        ("nowhere", RunFileError, r"data.{name}.source: 'nowhere' is not a built-in source"),
    ],
)
def test_unusable_set_is_refused_before_anything_is_written(
    coded: Workshop, name: str, given: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match="(?s)" + words.format(name=name)):
        coded.prepare("data.py:load", **{name: given})
    assert coded.files() == {}


def test_sample_weights_may_be_missing_on_either_side(coded: Workshop) -> None:
    assert coded.prepare("data.py:load", validation="data.py:load_weighted").validation_examples == 1
    assert coded.prepare("data.py:load_weighted", validation="data.py:load_labelled").validation_examples == 1


def test_labels_of_a_set_are_checked_like_those_of_training(coded: Workshop) -> None:
    with pytest.raises(SourceError, match=r"label y is 9, outside of \[0, 8\)"):
        coded.prepare("data.py:load", {"n": 8}, classes=8, test="data.py:load_labelled")


def test_groups_of_a_feature_are_held_out_whole(coded: Workshop) -> None:
    ref = coded.prepare("data.py:load_groups", split_by="user_id", validation_fraction=0.3)
    users = [{label % 12 for label in coded.labels(ref, part)} for part in ("train", "validation")]
    assert users[0].isdisjoint(users[1])
    assert users[0] | users[1] == set(range(12))
    assert ref.train_examples == 5 * len(users[0])
    other = coded.prepare("data.py:load_groups", validation_fraction=0.3)
    assert other.folder != ref.folder


@pytest.mark.parametrize("source", ["data.py:load", "npz"])
def test_last_examples_are_held_out(coded: Workshop, source: str) -> None:
    coded.write("data.npz", {"x": np.zeros((40, 3), np.float32), "y": np.arange(40)})
    options = {"path": "data.npz", "y": "y"} if source == "npz" else {}
    ref = coded.prepare(source, options, split="last", validation_fraction=0.25, shard_examples=7)
    assert sorted(coded.labels(ref, "validation")) == list(range(30, 40))
    assert sorted(coded.labels(ref)) == list(range(30))


def test_default_split_adds_nothing_to_the_name() -> None:
    assert settings_of_split(DataSpec(source="digits", validation_fraction=0.3)) == {}
    assert settings_of_split(DataSpec(source="digits", split="last")) == {"split": "last"}
    assert settings_of_split(DataSpec(source="digits", split_by="y")) == {"split_by": "y"}


NAMED = """
import numpy as np
import tensorflow as tf

def load(names):
    found = tf.data.Dataset.from_tensor_slices((np.eye(3, dtype=np.float32), np.arange(3))).batch(3)
    found.class_names = names
    return found
"""


def write_folders(workshop: Workshop, root: str, *names: str) -> None:
    """Write one image for each class; all its pixels have the class's number in its name."""
    import tensorflow as tf

    for name in names:
        image = tf.io.encode_png(np.full((2, 2, 1), int(name), np.uint8)).numpy()
        workshop.write(f"{root}/{name}/a.png", image)


def images_of(path: str, **options: Any) -> dict[str, Any]:
    return {"source": "images", "options": {"path": path, "size": [2, 2], "channels": 1, **options}}


def classes_of_pixels(workshop: Workshop, folder: str) -> dict[int, int]:
    """Return pixel value -> label of the examples of a dataset."""
    import tensorflow as tf

    from baton.tasks.foundation.dataset.shards import parse

    manifest = read_manifest(workshop.storage, folder)
    shards = [str(workshop.storage.root / folder / shard.path) for shard in manifest.train]
    batch = parse(tf.constant(list(tf.data.TFRecordDataset(shards).as_numpy_iterator())), manifest.features)
    return {int(x.flat[0]): int(y) for x, y in zip(batch["x"].numpy(), batch["y"].numpy(), strict=True)}


def test_folders_of_a_set_have_the_labels_of_the_training(workshop: Workshop) -> None:
    names = sorted(str(number) for number in range(1, 13))
    write_folders(workshop, "train", *names)
    write_folders(workshop, "val", "2", "10", "12")
    write_folders(workshop, "first", *names[:3])
    for _ in range(2):  # written, then used again
        ref = workshop.prepare(**images_of("train"), validation=images_of("val"), test=images_of("first"))
        assert ref.validation is not None
        assert ref.test is not None
        assert classes_of_pixels(workshop, ref.validation.folder) == {2: 4, 10: 1, 12: 3}
        assert classes_of_pixels(workshop, ref.test.folder) == {1: 0, 10: 1, 11: 2}
    # A set that numbers its classes as it would alone is the dataset that it is without training classes.
    workshop.write("data.py", CODE.replace("np.full(3, number, np.float32)", "np.zeros((2, 2, 1), np.uint8)"))
    alone = workshop.prepare("data.py:load", validation=images_of("val"), test=images_of("first"))
    assert alone.test == ref.test
    assert alone.validation is not None
    assert alone.validation.folder != ref.validation.folder
    assert classes_of_pixels(workshop, alone.validation.folder) == {10: 0, 12: 1, 2: 2}


@pytest.mark.parametrize("on", ["validation", "test"])
def test_set_with_a_class_that_training_has_not_is_refused(workshop: Workshop, on: str) -> None:
    write_folders(workshop, "train", "1", "2")
    write_folders(workshop, "other", "0", "1")
    with pytest.raises(SourceError) as refused:
        workshop.prepare(**images_of("train"), **{on: images_of("other")})
    assert str(refused.value).startswith(f"data.{on}: y = 2 means '0', and nothing in training")
    assert not workshop.files()


def test_labels_with_other_names_are_refused(workshop: Workshop) -> None:
    """A dataset with `class_names` has numbers alone, so nothing can map them."""
    workshop.write("data.py", NAMED)
    training = {"names": ["ant", "bee", "cat"]}

    def prepare(*names: str) -> Any:
        own = {"source": "data.py:load", "options": {"names": list(names)}}
        return workshop.prepare("data.py:load", training, validation=own)

    with pytest.raises(SourceError, match=r"data\.validation: y = 0 means 'bee', and 'ant' in training"):
        prepare("bee", "cat", "ant")
    assert not workshop.files()
    workshop.prepare("data.py:load", training, validation_fraction=0.0)
    with pytest.raises(SourceError, match=r"data\.validation: y = 1 means 'cat', and 'bee' in training"):
        prepare("ant", "cat")  # the training data is there already
    assert prepare("ant", "bee").validation_examples == 3
    assert prepare().validation_examples == 3  # no names say nothing
