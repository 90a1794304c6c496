"""The doctor's arithmetic, its sample of the data, and what it measures of the store."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import keras
import numpy as np
import pytest
import tensorflow as tf

from flows.doctor import data_sample, input_speed, storage_checks
from flows.doctor.data_sample import Sample, sample_of
from flows.doctor.finding import Checks
from flows.doctor.input_speed import feeds_fast_enough, first_batch
from flows.doctor.preemption_cost import best_interval, interval_seconds, preemptions
from flows.doctor.run_file_checks import batch_arithmetic, target_of
from flows.doctor.storage_checks import CommitCost, commit_cost
from flows.goal import storage_of
from tasks.foundation.contracts.run_file import RunFile, load_run_file
from tasks.foundation.errors import SourceError, StoreRefused
from tasks.foundation.storage.local import LocalStorage
from tasks.foundation.telemetry.events import Silent
from tests.fakes.gcs.fake_gcs import FakeGcs
from tests.support.faulty_runs import V5E, make_run

MiB = 1 << 20


def run_with(tmp_path: Path, *overrides: str) -> RunFile:
    return load_run_file(make_run(tmp_path / "run"), overrides)


@pytest.mark.parametrize(
    ("commit_seconds", "hours", "seconds"),
    [(8.0, 4.0, 480.0), (2.0, 1.0, 120.0), (0.01, 1.0, 60.0)],
)
def test_the_best_interval_is_that_of_young(commit_seconds: float, hours: float, seconds: float) -> None:
    assert best_interval(commit_seconds, hours) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("overrides", "step_seconds", "seconds"),
    [
        ([], None, None),
        ([], 0.5, 500.0),
        (["train.segment_steps=100"], 0.5, 50.0),
        (["train.segment_steps=5000"], 0.5, 500.0),
        (["train.segment_seconds=70"], None, 70.0),
        (["train.segment_seconds=70", "checkpoint.every_seconds=20"], 0.5, 20.0),
    ],
)
def test_the_run_files_own_interval(
    overrides: list[str], step_seconds: float | None, seconds: float | None, tmp_path: Path
) -> None:
    assert interval_seconds(run_with(tmp_path, *overrides), step_seconds) == seconds


@pytest.mark.parametrize(
    ("overrides", "step_seconds", "commit_seconds", "verdict", "words"),
    [
        ([], None, 8.0, "pass", ["8 min 00 s apart", "about 4 min 11 s", "train.segment_seconds: 480"]),
        (["train.steps=100000", "train.segment_steps=1000"], 0.5, 8.0, "pass", ["commits every 8 min 20 s"]),
        (["train.steps=100000"], 0.5, 8.0, "warn", ["13 h 53 min", "100% of the time", "train.segment_steps: 960"]),
        (["train.steps=100000", "train.segment_steps=10"], 0.5, 8.0, "warn", ["every 5.0 s", "segment_steps: 960"]),
        ([], 0.01, 8.0, "pass", ["the whole run takes 10 s"]),
        ([], 1e-7, 8.0, "pass", ["the whole run takes 0.0 s"]),
        (["train.segment_steps=100"], 0.01, 0.1, "pass", ["the whole run takes 10 s"]),
        (["train.segment_steps=100"], 0.01, 8.0, "warn", ["every 1.0 s", "one segment will do"]),
        (["train.segment_seconds=480"], None, 40.0, "warn", ["stop.grace_seconds = 25", "nearer"]),
    ],
)
def test_what_a_preemption_costs(
    tmp_path: Path,
    *,
    overrides: list[str],
    step_seconds: float | None,
    commit_seconds: float,
    verdict: str,
    words: list[str],
) -> None:
    cost = CommitCost(commit_seconds=commit_seconds, restore_seconds=1.0, state_bytes=1)
    found = preemptions(
        run_with(tmp_path, *overrides), cost, start_seconds=10.0, step_seconds=step_seconds, hours_between=4.0
    )
    told = f"{found.text} {found.remedy}"
    assert found.verdict == verdict, told
    assert [word for word in words if word not in told] == [], told


@pytest.mark.parametrize(
    ("batch", "verdict", "words"),
    [
        (1024, "pass", "128 each; no padding"),
        (64, "pass", "no padding along the 8 of"),
        (16, "warn", "75% of that is padding"),
    ],
)
def test_what_a_tpu_pads(batch: int, verdict: str, words: str, tmp_path: Path) -> None:
    run = run_with(tmp_path, f"train.global_batch_size={batch}")
    found = batch_arithmetic(run, target_of(run, V5E).value)
    assert found.verdict == verdict
    assert words in found.text


def test_a_cpu_of_the_run_file_is_taken_as_it_is(tmp_path: Path) -> None:
    run = run_with(tmp_path, "accelerator.kind=cpu", "accelerator.replicas=4")
    target = target_of(run, None).value
    assert (target.replicas, target.is_tpu) == (4, False)
    assert batch_arithmetic(run, target).text == "64 examples over 4 replicas: 16 each"
    named = target_of(run, V5E)
    assert (named.verdict, named.value.replicas) == ("warn", 8)
    assert "kind: cpu" in named.text


def test_a_source_without_end_is_looked_at_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_sample, "_MOST_EXAMPLES", 50)
    file = make_run(tmp_path / "run", ("data.py", "number in range(96)", "number in __import__('itertools').count()"))
    sample: Sample = sample_of(load_run_file(file), None, tmp_path / "scratch").value
    assert sample.manifest.train_examples == 50
    monkeypatch.setattr(data_sample, "_MOST_BYTES", 300)
    assert sample_of(load_run_file(file), None, tmp_path / "other").value.manifest.train_examples < 10
    monkeypatch.setattr(data_sample, "_MOST_SECONDS", 0.0)
    assert sample_of(load_run_file(file), None, tmp_path / "third").value.manifest.train_examples == 1


def test_an_empty_source_is_refused(tmp_path: Path) -> None:
    file = make_run(tmp_path / "run", ("data.py", "range(96)", "range(0)"))
    with pytest.raises(SourceError, match="holds no example"):
        sample_of(load_run_file(file), None, tmp_path / "scratch")


def test_a_prepared_dataset_is_used_as_it_is(tmp_path: Path) -> None:
    from tasks.prepare_data.stage import prepare_data

    run = run_with(tmp_path)
    storage = storage_of(run)
    prepare_data(run.spec, code_folder=run.folder, storage=storage, telemetry=Silent())
    found = sample_of(run, storage, tmp_path / "scratch")
    assert found.text.startswith("prepared: 96 examples of x float32[6], y int64[]")
    assert found.value.is_whole
    assert not (tmp_path / "scratch").exists()
    x, y = first_batch(run, found.value, each=16)
    assert (x.shape, y.shape) == ((16, 6), (16,))


def test_records_in_place_are_read_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = tf.train.Feature(
        bytes_list=tf.train.BytesList(value=[tf.io.encode_png(np.zeros((4, 5, 3), np.uint8)).numpy()])
    )
    example = tf.train.Example(features=tf.train.Features(feature={"image": image}))
    with tf.io.TFRecordWriter(str(tmp_path / "made.tfrecord")) as writer:
        for _ in range(9):
            writer.write(example.SerializeToString())
    monkeypatch.setattr(data_sample, "_MOST_EXAMPLES", 4)
    monkeypatch.setattr(input_speed, "_MEASURED_BATCHES", 3)
    run = run_with(
        tmp_path,
        "data={source: tfrecord}",
        "data.options={path: ../made.tfrecord, x: image, features: {image: {dtype: uint8, shape: [4, 5, 3], "
        "encoding: image}}}",
    )
    found = sample_of(run, None, tmp_path / "scratch")
    assert found.text == "4 examples of the source are sound: x uint8[4, 5, 3]"
    shard = found.value.manifest.train[0]
    assert Path(shard.path).resolve() == tmp_path / "made.tfrecord"
    assert found.value.manifest.features[0].encoding == "image", "decoding is part of what is measured"
    assert "examples/s a host" in feeds_fast_enough(run, target_of(run, V5E).value, found.value, None).text


@pytest.mark.parametrize(
    ("policy", "gigabytes", "verdict"),
    [
        ("float32", 11, "pass"),
        ("float32", 12, "warn"),
        ("float32", 16, "fail"),
        ("mixed_bfloat16", 11, "pass"),
        ("mixed_bfloat16", 16, "warn"),
        ("mixed_bfloat16", 48, "fail"),
    ],
)
def test_memory_of_a_replica(policy: str, gigabytes: int, verdict: str, tmp_path: Path) -> None:
    from flows.doctor.xla_compile import fits

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype=policy)])
    built: Any = SimpleNamespace(state=SimpleNamespace(model=model, leaves=()), arguments=())
    found = fits(built, gigabytes * 10**9, target_of(run_with(tmp_path), V5E).value)
    assert found.verdict == verdict
    assert ("3 times too much" in found.text) == (policy != "float32")
    assert bool(found.remedy) == (verdict != "pass")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was uploaded to a folder."""
    names: list[str] = []
    upload = LocalStorage.upload

    def noted(self: LocalStorage, source: Path, path: str) -> Any:
        names.append(path)
        return upload(self, source, path)

    monkeypatch.setattr(LocalStorage, "upload", noted)
    return names


def some_state(mebibytes: int) -> Any:
    from tasks.foundation.model.variables import Leaf

    variables = [tf.Variable(tf.fill([MiB // 4], float(number))) for number in range(mebibytes)]
    leaves = [
        Leaf(path=f"model/v{number}", variable=variable, per_replica=False) for number, variable in enumerate(variables)
    ]
    return SimpleNamespace(leaves=leaves)


def test_a_commit_is_measured_and_nothing_is_left(tmp_path: Path, sent: list[str]) -> None:
    state = some_state(3)
    found = commit_cost(LocalStorage(tmp_path / "far" / "runs"), state)
    assert found.value.state_bytes > 3 * MiB
    assert found.value.commit_seconds > 0
    assert found.value.restore_seconds > 0
    assert sorted(sent) == ["ckpt.data-00000-of-00001", "ckpt.index"]
    assert [float(leaf.variable[0]) for leaf in state.leaves] == [0.0, 1.0, 2.0]
    assert list(tmp_path.iterdir()) == []


def test_of_a_large_state_a_part_is_sent(tmp_path: Path, sent: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_checks, "_SENT_BYTES", MiB)
    monkeypatch.setattr(storage_checks, "_SHARD_BYTES", MiB)
    found = commit_cost(LocalStorage(tmp_path), some_state(4))
    assert len(sent) == 1
    assert "were sent, the rest is taken to be as fast" in found.text


@pytest.mark.parametrize("address", ["./runs", "gs://bucket/team"])
def test_what_was_sent_is_deleted_after_a_failure_too(
    address: str, tmp_path: Path, cloud: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise StoreRefused("no")

    run = run_with(tmp_path, f"storage={address}")
    storage = storage_of(run)
    monkeypatch.setattr(type(storage), "download", refuse)
    found = Checks(lambda _: None).make("commit", lambda: commit_cost(storage, some_state(1)))
    assert (found.verdict, found.text) == ("fail", "no")
    assert not (run.folder / "runs").exists()
    assert cloud.store.names("bucket") == []
