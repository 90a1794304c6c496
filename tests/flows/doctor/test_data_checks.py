"""The sample of the run's data, and the speed of reading it."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from flows.doctor import data_checks
from flows.doctor.data_checks import DataSample, check_data, check_input, first_batch
from flows.doctor.run_file_checks import check_accelerator
from flows.opened_run import storage_of
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.contracts.stage_calls import PrepareDataCall
from tasks.foundation.errors import SourceError
from tasks.foundation.stage import Place
from tasks.foundation.telemetry.events import Silent
from tests.support.faulty_runs import V5E, load_faulty_run, make_run


def test_endless_source_is_sampled_up_to_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_checks, "_MAX_EXAMPLES", 50)
    file = make_run(tmp_path / "run", ("data.py", "number in range(96)", "number in __import__('itertools').count()"))
    sample: DataSample = check_data(load_run_file(file), None, tmp_path / "scratch").value
    assert sample.manifest.train_examples == 50
    monkeypatch.setattr(data_checks, "_MAX_BYTES", 300)
    assert check_data(load_run_file(file), None, tmp_path / "other").value.manifest.train_examples < 10
    monkeypatch.setattr(data_checks, "_MAX_SECONDS", 0.0)
    assert check_data(load_run_file(file), None, tmp_path / "third").value.manifest.train_examples == 1


def test_empty_source_is_refused(tmp_path: Path) -> None:
    file = make_run(tmp_path / "run", ("data.py", "range(96)", "range(0)"))
    with pytest.raises(SourceError, match="yields no examples"):
        check_data(load_run_file(file), None, tmp_path / "scratch")


def test_prepared_dataset_is_used(tmp_path: Path) -> None:
    from tasks.prepare_data.stage import prepare_data

    run = load_faulty_run(tmp_path)
    storage = storage_of(run)
    place = Place.of(storage, run.spec.run, code_folder=run.folder, telemetry=Silent())
    prepare_data(PrepareDataCall(spec=run.spec), place)
    found = check_data(run, storage, tmp_path / "scratch")
    assert found.text.startswith("prepared: 96 examples of x float32[6], y int64[]")
    assert found.value.is_whole
    assert not (tmp_path / "scratch").exists()
    x, y = first_batch(run, found.value, per_replica=16)
    assert (x.shape, y.shape) == ((16, 6), (16,))


def test_tfrecords_are_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = tf.train.Feature(
        bytes_list=tf.train.BytesList(value=[tf.io.encode_png(np.zeros((4, 5, 3), np.uint8)).numpy()])
    )
    example = tf.train.Example(features=tf.train.Features(feature={"image": image}))
    with tf.io.TFRecordWriter(str(tmp_path / "made.tfrecord")) as writer:
        for _ in range(9):
            writer.write(example.SerializeToString())
    monkeypatch.setattr(data_checks, "_MAX_EXAMPLES", 4)
    monkeypatch.setattr(data_checks, "_MEASURED_BATCHES", 3)
    run = load_faulty_run(
        tmp_path,
        "data={source: tfrecord}",
        "data.options={path: ../made.tfrecord, x: image, features: {image: {dtype: uint8, shape: [4, 5, 3], "
        "encoding: image}}}",
    )
    found = check_data(run, None, tmp_path / "scratch")
    assert found.text == "the first 4 examples of the source are valid: x uint8[4, 5, 3]"
    shard = found.value.manifest.train[0]
    assert Path(shard.path).resolve() == tmp_path / "made.tfrecord"
    assert found.value.manifest.features[0].encoding == "image"
    assert "examples/s per host" in check_input(run, check_accelerator(run, V5E).value, found.value, None).text
