"""A mixture names datasets of its own: each is prepared once, and checked against the others before it is written."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.contracts.data_spec import DataSpec
from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.contracts.stage_calls import PrepareDataCall
from baton.tasks.foundation.dataset.manifest import load_manifest
from baton.tasks.foundation.dataset.read import training_dataset
from baton.tasks.foundation.errors import RunFileError, SourceError
from baton.tasks.foundation.stage import Place
from baton.tasks.prepare_data.stage import prepare_data
from tests.prepare_data.conftest import Workshop, make_spec
from tests.prepare_data.test_evaluation_sets import NAMED, classes_of_pixels, images_of, labels_on, write_folders
from tests.support.tfrecords import PLAIN, SPEC, file_of, record

CODE = """
import numpy as np

def load(first=0, n=40):
    for number in range(first, first + n):
        yield np.full(3, number, np.float32), number

def load_wide():
    yield np.zeros(4, np.float32), 1

def load_named():
    yield {"left": np.zeros(3, np.float32)}, 1

def load_double():
    yield np.zeros(3), 1

def load_nothing():
    yield from ()
"""
WEB = {"source": "data.py:load", "weight": 0.7}
BOOKS = {"source": "data.py:load", "options": {"first": 100, "n": 20}, "weight": 0.3}


@pytest.fixture
def coded(workshop: Workshop) -> Workshop:
    workshop.write("data.py", CODE)
    return workshop


def spec_of(*sources: dict[str, Any], **data: Any) -> RunSpec:
    return make_spec("", sources=list(sources), **data)


def prepare(workshop: Workshop, spec: RunSpec) -> DatasetRef:
    place = Place.of(workshop.storage, spec.run, code_folder=workshop.code, telemetry=workshop)
    return prepare_data(PrepareDataCall(spec=spec), place)


def test_sources_are_datasets_that_runs_on_them_share(coded: Workshop) -> None:
    alone = coded.prepare("data.py:load")
    before = coded.files()
    ref = prepare(coded, spec_of(WEB, BOOKS))
    manifest = load_manifest(coded.storage, ref)
    assert manifest.mixture is not None
    web, books = manifest.mixture.sources
    assert (web.folder, web.content_digest, web.weight, books.weight) == (alone.folder, alone.content_digest, 7, 3)
    assert ref.train_examples == web.train_examples + books.train_examples
    assert ref.validation_examples == web.validation_examples + books.validation_examples
    assert min(web.validation_examples, books.validation_examples) > 0
    assert ref.train_examples + ref.validation_examples == 60
    assert coded.files().items() >= before.items()
    assert coded.prepare("data.py:load", BOOKS["options"]).folder == books.folder
    # A second time, and as a remote stage hands it on, it is the same; nothing is written.
    before = coded.files()
    again = prepare(coded, spec_of(WEB, BOOKS))
    assert again == ref.model_copy(update={"already_prepared": True})
    assert DatasetRef.model_validate_json(ref.to_json()) == ref
    assert RunSpec.model_validate_json(spec_of(WEB, BOOKS).to_json()) == spec_of(WEB, BOOKS)
    assert coded.files() == before


def test_other_weights_write_a_manifest_and_no_example(coded: Workshop) -> None:
    ref = prepare(coded, spec_of(WEB, BOOKS))
    before = coded.files()
    other = prepare(coded, spec_of(WEB, BOOKS | {"weight": 0.7}))
    dropped = prepare(coded, spec_of(WEB, BOOKS, exhausted="drop"))
    assert len({ref.folder, other.folder, dropped.folder}) == 3
    assert ref.content_digest == other.content_digest == dropped.content_digest
    assert {path.rpartition("/")[2] for path in coded.files().keys() - before.keys()} == {"manifest.json"}
    scaled = prepare(coded, spec_of(WEB | {"weight": 14}, BOOKS | {"weight": 6}))
    assert scaled.folder == ref.folder


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("load_wide", [r"x float32\[3\], y int64\[\]", r"x float32\[4\], y int64\[\]"]),
        ("load_double", [r"x float32\[3\]", r"x float64\[3\]"]),
        ("load_named", [r"x float32\[3\]", r"x/left float32\[3\]"]),
        ("load_nothing", [r"data\.sources\[1\]\.source: data\.py:load_nothing: it has no examples"]),
    ],
)
def test_sources_that_differ_are_refused_before_writing(coded: Workshop, other: str, words: list[str]) -> None:
    with pytest.raises(SourceError) as refused:
        prepare(coded, spec_of(WEB, {"source": f"data.py:{other}"}))
    for word in words:
        refused.match(word)
    if other != "load_nothing":
        refused.match(r"data\.sources\[0\] data\.py:load")
        refused.match(rf"data\.sources\[1\] data\.py:{other}")
    assert not coded.files()


def test_errors_name_the_source_of_the_mixture(coded: Workshop) -> None:
    with pytest.raises(RunFileError, match=r"data\.sources\[1\]\.source: 'nothing' is not a built-in source"):
        prepare(coded, spec_of(WEB, {"source": "nothing"}))
    with pytest.raises(RunFileError, match=r"data\.sources\[0\]\.source: 'nothing' is not a built-in source"):
        prepare(coded, spec_of({"source": "nothing"}, WEB))
    with pytest.raises(SourceError, match=r"data\.sources\[1\]\.options\.path: 'none\.npz'"):
        prepare(coded, spec_of(WEB, {"source": "npz", "options": {"path": "none.npz", "x": "x"}}))
    with pytest.raises(RunFileError, match=r"data\.sources\[1\]\.options\.frist"):
        prepare(coded, spec_of(WEB, {"source": "data.py:load", "options": {"frist": 1}}))


@pytest.mark.parametrize(("batched", "reading"), [(None, "examples"), (False, "rows")])
def test_only_a_source_that_may_yield_batches_is_asked(coded: Workshop, batched: bool | None, reading: str) -> None:
    spec = spec_of(WEB | {"batched": batched}, BOOKS | {"batched": False})
    place = Place.of(coded.storage, spec.run, code_folder=coded.code, telemetry=coded)
    asked: list[tuple[str, str]] = []

    def check(features: Any, how: str) -> None:
        asked.append((features[0].name, how))

    ref = prepare_data(PrepareDataCall(spec=spec), dataclasses.replace(place, check_features=check))
    assert asked == [("x", reading)]  # once, though two datasets are written
    assert load_manifest(coded.storage, ref).reading == reading
    assert spec.data.may_yield_batches == (batched is None)


def test_sets_of_a_mixture_are_compared_with_its_examples(coded: Workshop) -> None:
    own = {"source": "data.py:load", "options": {"first": 500, "n": 5}}
    ref = prepare(coded, spec_of(WEB, BOOKS, validation=own))
    assert (ref.train_examples, ref.validation_examples) == (60, 5)
    assert ref.validation is not None
    with pytest.raises(SourceError, match=r"data\.validation: its examples differ from the training examples"):
        prepare(coded, spec_of(WEB, BOOKS, validation={"source": "data.py:load_wide"}))


def test_arrays_and_functions_mix(coded: Workshop) -> None:
    coded.write("more.npz", {"x": np.ones((6, 3), np.float32), "y": np.arange(6)})
    npz = {"source": "npz", "options": {"path": "more.npz", "x": "x", "y": "y"}, "weight": 2}
    assert prepare(coded, spec_of(WEB, npz, validation_fraction=0.0)).train_examples == 46


def test_records_that_stay_in_their_files_mix(coded: Workshop) -> None:
    for folder, numbers in (("one", range(12)), ("two", range(12, 20))):
        coded.write(f"{folder}/part", file_of([record(number) for number in numbers], coded.code))
    options = {**PLAIN, "features": SPEC, "x": {"v": "values", "i": "image"}}
    one, two = ({"source": "tfrecord", "options": {**options, "path": folder}} for folder in ("one", "two"))
    ref = prepare(coded, spec_of(one, two, exhausted="drop", validation_fraction=0.3))
    assert {path.rpartition("/")[2] for path in coded.files()} == {"manifest.json"}
    train = training_dataset(coded.storage, ref, seed=0, global_batch_size=1, window_shards=2, first_batch=0)
    found = list(train.take(ref.train_examples).as_numpy_iterator())
    assert all((x["i"] == y).all() and (x["v"][0, 0] == y).all() for x, y in found)
    validation = labels_on(coded, ref, "validation")
    assert sorted([*(int(y[0]) for _, y in found), *validation]) == list(range(20))
    # Records in place, and those that Baton writes, which hold the same arrays in different ways.
    plain = {"source": "tfrecord", "options": {**PLAIN, "path": "one"}}
    coded.write("more.npz", {"x": np.ones((6, 2), np.float32), "y": np.arange(6)})
    npz = {"source": "npz", "options": {"path": "more.npz", "x": "x", "y": "y"}}
    ref = prepare(coded, spec_of(plain, npz, exhausted="drop", validation_fraction=0.0))
    train = training_dataset(coded.storage, ref, seed=0, global_batch_size=1, window_shards=2, first_batch=0)
    rows = [(x[0].tolist(), int(y[0])) for x, y in train.take(18).as_numpy_iterator()]
    of_npz = [([1, 1], n) for n in range(6)]
    assert sorted(rows) == sorted([*of_npz, *(([n, n / 2], n) for n in range(12))])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"source": ""}, "source is empty; name a source, or several under sources"),
        ({"source": "digits", "exhausted": "drop"}, "exhausted = drop is for a mixture"),
        ({"source": "digits", "sources": [WEB, BOOKS]}, "source = digits and sources both name the examples"),
        ({"sources": [WEB]}, "sources has one source; write source: data.py:load"),
        ({"sources": [WEB, WEB]}, r"sources\[0\] and sources\[1\] are the same .* with weight: 1.4"),
        ({"sources": [WEB, BOOKS], "options": {"n": 3}}, "options = .* is of a single source; move it into each"),
        ({"sources": [WEB, BOOKS], "version": 2}, "version = 2 is of a single source"),
        ({"sources": [WEB, BOOKS], "batched": False}, "batched = False is of a single source"),
        ({"sources": [WEB, BOOKS], "examples": 5}, "examples = 5 is of a single source"),
        ({"sources": [WEB, BOOKS | {"weight": 0}]}, "greater than 0"),
        ({"sources": [WEB, BOOKS | {"weight": float("inf")}]}, "finite number"),
        ({"sources": [WEB, BOOKS | {"weight": 1e-9}]}, r"sources\[1\]\.weight = 1e-09 is less than 1/32768 of all"),
        ({"sources": [WEB, BOOKS], "exhausted": "stop"}, "'repeat' or 'drop'"),
        ({"sources": [WEB, {"source": "tfrecord"}], "split": "last"}, "split = last needs records that Baton copies"),
    ],
)
def test_mixtures_that_mean_nothing_are_refused(data: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DataSpec.model_validate(data)


def test_sources_of_a_mixture_share_their_classes(workshop: Workshop) -> None:
    write_folders(workshop, "a", "2", "3")
    write_folders(workshop, "b", "1", "3")
    write_folders(workshop, "val", "1")
    ref = prepare(workshop, spec_of(images_of("a"), images_of("b"), validation=images_of("val")))
    manifest = load_manifest(workshop.storage, ref)
    assert manifest.class_names == ("2", "3", "1")
    assert manifest.mixture is not None
    assert ref.validation is not None
    folders = [*(each.folder for each in manifest.mixture.sources), ref.validation.folder]
    assert [classes_of_pixels(workshop, folder) for folder in folders] == [{2: 0, 3: 1}, {3: 1, 1: 2}, {1: 2}]


def test_sources_whose_labels_have_other_names_are_refused(workshop: Workshop) -> None:
    workshop.write("data.py", NAMED)
    names = [{"source": "data.py:load", "options": {"names": each}} for each in (["a"], ["a", "b"], ["a", "c"])]
    with pytest.raises(SourceError, match=r"^data\.sources\[1\] .* y = 1 means 'b', and 'c' in data\.sources\[2\]"):
        prepare(workshop, spec_of(*names))
    prepare(workshop, spec_of(*names[:2]))
