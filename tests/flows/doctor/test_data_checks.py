"""The sample of the run's data, and the speed of reading it."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from baton.flows.doctor import data_checks
from baton.flows.doctor.data_checks import DataSample, check_data, check_input, first_batch
from baton.flows.doctor.run_file_checks import Checks, check_accelerator
from baton.flows.opened_run import storage_of
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.contracts.stage_calls import PrepareDataCall
from baton.tasks.foundation.errors import SourceError
from baton.tasks.foundation.stage import Place
from baton.tasks.foundation.telemetry.events import Silent
from tests.support.faulty_runs import SLICE, V5E, load_faulty_run, make_run


def test_endless_source_is_sampled_up_to_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_checks, "_MAX_EXAMPLES", 50)
    file = make_run(tmp_path / "run", ("data.py", "number in range(96)", "number in __import__('itertools').count()"))
    sample: DataSample = check_data(load_run_file(file), None, tmp_path / "scratch").value
    assert sample.manifest.train_examples == 50
    monkeypatch.setattr(data_checks, "_MAX_BYTES", 300)
    assert check_data(load_run_file(file), None, tmp_path / "other").value.manifest.train_examples < 10
    monkeypatch.setattr(data_checks, "_MAX_SECONDS", 0.0)
    assert check_data(load_run_file(file), None, tmp_path / "third").value.manifest.train_examples == 1


def test_slow_input_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_checks, "_MEASURED_SECONDS", 0.05)
    run = load_faulty_run(tmp_path)
    sample = check_data(run, None, tmp_path / "scratch").value
    found = check_input(run, check_accelerator(run, V5E).value, sample, 1e-7)
    assert found.verdict == "warn"
    assert "would wait for input" in found.text


IN_PYTHON = """import numpy as np
import tensorflow as tf

def in_python(example):
    x = tf.numpy_function(lambda x: x, [example[0]], tf.float32, stateful=False)
    return tf.ensure_shape(x, example[0].shape), example[1]
"""


def test_transform_in_python_fails_on_a_slice(tmp_path: Path) -> None:
    file = make_run(
        tmp_path / "run", ("data.py", "import numpy as np", IN_PYTHON), ("data.py", "range(96)", "range(960)")
    )
    run = load_run_file(file, ["data.transform=data.py:in_python", "train.global_batch_size=128"])
    sample = check_data(run, None, tmp_path / "scratch").value
    checks = Checks(lambda _: None)
    found = checks.run("input", lambda: check_input(run, check_accelerator(run, SLICE).value, sample, None))
    assert found.verdict == "fail"
    assert "calls Python (PyFuncStateless)" in found.text


def test_empty_source_is_refused(tmp_path: Path) -> None:
    file = make_run(tmp_path / "run", ("data.py", "range(96)", "range(0)"))
    with pytest.raises(SourceError, match="yields no examples"):
        check_data(load_run_file(file), None, tmp_path / "scratch")


def test_prepared_dataset_is_used(tmp_path: Path) -> None:
    from baton.tasks.prepare_data.stage import prepare_data

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
