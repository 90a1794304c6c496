"""Own validation and test sets: datasets of their own, checked before anything is written."""

from typing import Any

import numpy as np
import pytest

from tasks.foundation.contracts.data_spec import DataSpec
from tasks.foundation.dataset.evaluation_sets import set_batches, set_remainder
from tasks.foundation.errors import RunFileError, SourceError
from tasks.prepare_data.split import settings_of_split
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
