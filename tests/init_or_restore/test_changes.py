"""Accepted changes of a run's identity, and forks."""

import uuid
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.checkpoint.fork import fork
from baton.tasks.foundation.contracts.log_entry import Change, Head, UnfinishedFork
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.contracts.stage_calls import InitOrRestoreCall
from baton.tasks.foundation.errors import IdentityChanged, InvalidInput, SourceError
from baton.tasks.foundation.telemetry.events import Event, Note
from tests.support.lab import Lab, lab_of, restored, spec_of
from tests.support.tfrecords import file_of, record

MODEL = """
def build(optimizer="sgd", rate=0.1, summed=False):
    x = keras.Input((6,))
    y = layers.SeededNoise()(x)
    model = keras.Model(x, keras.layers.Dense(3, activation="softmax")(y))
    made = keras.optimizers.SGD(rate) if optimizer == "sgd" else keras.optimizers.Adam(rate)
    loss = keras.losses.SparseCategoricalCrossentropy(reduction="sum" if summed else "sum_over_batch_size")
    model.compile(made, loss=loss, metrics=["accuracy"])
    return model
"""
NAMED = """
import numpy as np
import tensorflow as tf

def load(names, form="plain"):
    x = np.full((30, 6), sum(map(ord, names[1])), np.float32)
    found = tf.data.Dataset.from_tensor_slices((x, np.arange(30) % 3)).batch(6)
    found.class_names = names
    return found
"""
RATE = ("model.options", "compile.optimizer")


def begin(lab: Lab, spec: RunSpec, *accept: str) -> Head:
    from baton.tasks.init_or_restore.stage import init_or_restore

    call = InitOrRestoreCall(spec=spec, dataset=lab.prepare(spec), accept=accept)
    return init_or_restore(call, lab.place(spec))


def kinds(lab: Lab, spec: RunSpec) -> list[str]:
    return [entry.body.kind for entry in lab.log(spec).entries()]


def learning_rate(lab: Lab, spec: RunSpec, head: Head) -> float:
    import numpy as np

    assert head.tip is not None
    (value,) = (value for key, value in lab.tensors(spec, head.tip).items() if "/learning_rate/" in key)
    return float(np.frombuffer(value[2], np.float32)[0])


def digest(head: Head) -> str:
    assert head.tip is not None
    return head.tip.state_digest


@pytest.mark.slow
def test_accepted_learning_rate_is_logged_once_and_used(lab: Lab) -> None:
    spec = spec_of("build")
    before = lab.train_and_commit(spec, 3)
    changed = spec_of("build", model__options={"rate": 0.25})
    head = begin(lab, changed, *RATE)
    assert begin(lab, changed, *RATE) == head
    assert begin(lab, changed) == head, "an accepted value belongs to the run"
    assert kinds(lab, spec) == ["origin", "checkpoint", "checkpoint", "change"]
    (*_, entry) = lab.log(spec).entries()
    assert isinstance(entry.body, Change)
    assert entry.body.accepted == RATE
    assert (head.base, head.tip) == (before.base + 1, before.tip)
    notes = [event.text for event in lab.recorder.events if isinstance(event, Note)]
    assert len(notes) == 1
    assert notes[0].startswith("from step 3 on, as accepted: model.options.rate: absent -> 0.25; compile.optimizer.")
    # The checkpoint holds the old rate as a variable, but the new rate applies, also in later checkpoints.
    assert learning_rate(lab, spec, before) == pytest.approx(0.1)
    after = lab.train_and_commit(changed, 6)
    assert learning_rate(lab, spec, after) == 0.25
    # Also after a rewind or a quarantine to an earlier checkpoint.
    assert before.tip is not None
    assert float(restored(lab, changed, before.tip).model.optimizer.learning_rate.numpy()) == 0.25
    with pytest.raises(IdentityChanged, match=r"compile\.optimizer\.config\.learning_rate: 0\.25 -> 0\.1"):
        begin(lab, spec)


def test_learning_rate_set_by_the_model_belongs_to_the_state(tmp_path: Path) -> None:
    decaying = """
    class Decaying(keras.Model):
        def train_step(self, data):
            self.optimizer.learning_rate.assign(self.optimizer.learning_rate * 0.5)
            return super().train_step(data)


    def build():
        x = keras.Input((6,))
        model = Decaying(x, keras.layers.Dense(3, activation="softmax")(x))
        model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy")
        return model
    """
    lab, spec = lab_of(tmp_path, decaying), spec_of("build")
    lab.begin(spec)
    tip = lab.train_and_commit(spec, 2, 3).tip
    assert tip is not None
    assert float(restored(lab, spec, tip).model.optimizer.learning_rate.numpy()) == 0.5**4


CHANGES: dict[str, tuple[dict[str, Any], str, str]] = {
    "learning rate": (
        {"model__options": {"rate": 0.2}},
        "model.options,optimizer",
        "compile.optimizer.config.learning_rate: 0.1",
    ),
    "loss": ({"model__options": {"summed": True}}, "model.options,loss", "compile.loss.config.reduction: "),
    "batch": ({"train__global_batch_size": 16}, "global_batch_size", "train.global_batch_size: 8 -> 16"),
    "window": ({"data__window_shards": 2}, "window_shards", "data.window_shards: 8 -> 2"),
    "shards": ({"data__shard_examples": 5}, "content_digest", "data.content_digest: "),
    "seed": ({"train__seed": 1}, "content_digest,seed", "train.seed: 0 -> 1"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_refusal_names_the_keys_to_accept(lab: Lab, change: str) -> None:
    from baton.tasks.foundation.contracts.identity import accepted_keys

    changes, words, text = CHANGES[change]
    before = lab.log(spec_of("build")).require_head()
    changed = spec_of("build", **changes)
    with pytest.raises(IdentityChanged) as refused:
        begin(lab, changed, "compile.metrics")
    assert text in str(refused.value)
    assert f"baton run FILE --accept {words}\n" in str(refused.value)
    assert f"baton fork {lab.root}/storage/build --as NEW" in str(refused.value)
    *some, last = accepted_keys(words)
    if some:
        with pytest.raises(IdentityChanged, match=last):
            begin(lab, changed, *some)
    assert lab.log(changed).head() == before
    head = begin(lab, changed, *accepted_keys(words))
    assert begin(lab, changed) == head


def test_accepting_an_unchanged_key_logs_nothing(lab: Lab) -> None:
    before = lab.log(spec_of("build")).require_head()
    assert begin(lab, spec_of("build", data__classes=3, data__allow_nan=True), "compile.loss", *RATE) == before


def test_change_logged_by_another_process_is_enough(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, changed = spec_of("build"), spec_of("build", train__global_batch_size=16)
    emit = lab.recorder.emit

    def rival_comes_first(_: Event) -> None:
        monkeypatch.setattr(lab.recorder, "emit", emit)
        begin(lab, changed, "train.global_batch_size")

    monkeypatch.setattr(lab.recorder, "emit", rival_comes_first)
    head = begin(lab, changed, "train.global_batch_size")
    assert head == lab.log(spec).head()
    assert kinds(lab, spec) == ["origin", "checkpoint", "change"]


@pytest.mark.slow
def test_fork_continues_with_the_bits_of_its_run(lab: Lab) -> None:
    spec = spec_of("build")
    lab.train_and_commit(spec, 3)
    fork(lab.storage, "build", "forked", at_step=3, attempt=uuid.uuid4().hex)
    source = lab.train_and_commit(spec, 6, 11)
    forked = spec_of("build", run="forked")
    head = begin(lab, forked)
    assert (head.base, kinds(lab, forked)) == (1, ["origin", "checkpoint"])
    assert digest(lab.train_and_commit(forked, 5, 11)) == digest(source)
    # The change is accepted in the fork only.
    changed = spec_of("build", run="forked", train__global_batch_size=16)
    with pytest.raises(IdentityChanged):
        begin(lab, changed)
    assert begin(lab, changed, "train.global_batch_size").tip is not None
    assert lab.log(spec).head() == source


def test_unfinished_fork_does_not_start_at_step_0(lab: Lab) -> None:
    forked = spec_of("build", run="forked")
    fork(lab.storage, "build", "forked", at_step=0, attempt=uuid.uuid4().hex)
    made = fork(lab.storage, "build", "forked", at_step=0, attempt=uuid.uuid4().hex)
    home, origin_file = lab.home(forked), lab.home(forked).read("log/00000000.json")
    # As if the process had been killed before the origin entry.
    home.delete("log")
    home.write("fork.json", UnfinishedFork(lineage=made.lineage).to_json())
    with pytest.raises(InvalidInput, match=r"forked is a fork without a whole checkpoint.*--at-step 0 --as forked"):
        begin(lab, forked)
    assert lab.log(forked).head() is None
    # As if it had been killed between the origin entry and the commit.
    home.create("log/00000000.json", origin_file)
    origin = lab.log(forked).head()
    with pytest.raises(
        InvalidInput, match=r"forked is a fork without a whole checkpoint.*baton fork .*/build --at-step 0"
    ):
        begin(lab, forked)
    assert lab.log(forked).head() == origin
    fork(lab.storage, "build", "forked", at_step=0, attempt=uuid.uuid4().hex)
    assert begin(lab, forked).tip is not None


def test_changed_files_of_the_data_are_named(lab: Lab) -> None:
    records = lab.root / "records"
    records.mkdir()

    def write(name: str, first: int) -> Path:
        made = [record(number, values=[number / 9] * 6, label=[number % 3]) for number in range(first, first + 9)]
        (records / name).write_bytes(file_of(made, lab.root))
        return records / name

    files = [write(name, index) for index, name in enumerate("abc")]
    features = {"values": {"dtype": "float32", "shape": [6]}, "label": {"dtype": "int64"}}
    options = {"path": str(records), "features": features, "x": "values", "y": "label"}
    spec = spec_of("build", run="files", data__source="tfrecord", data__options=options)
    begin(lab, spec)
    write("b", 7)
    files[2].unlink()
    write("d", 3)
    with pytest.raises(IdentityChanged) as refused:
        begin(lab, spec)
    lines = [f"{files[1]}: changed since", f"{files[2]}: no longer read", f"{records / 'd'}: not read before"]
    assert [line for line in lines if line not in str(refused.value)] == []
    assert str(files[0]) not in str(refused.value)


def test_accepted_data_must_mean_the_same_by_its_labels(lab: Lab) -> None:
    """The weights have learned which class a number is; a fork goes on with them."""
    (lab.code / "named.py").write_text(NAMED, encoding="utf-8")

    def named(run: str, *names: str) -> RunSpec:
        return spec_of("build", run=run, data__source="named.py:load", data__options={"names": list(names)})

    begin(lab, named("first", "ant", "bee", "cat"))
    fork(lab.storage, "first", "forked", at_step=0, attempt=uuid.uuid4().hex)
    for run in ("first", "forked"):
        with pytest.raises(SourceError, match="data: y = 1 means 'cat', and 'bee' in the data"):
            begin(lab, named(run, "ant", "cat", "bee"), "data.content_digest")
        assert kinds(lab, named(run)) == ["origin", "checkpoint"]
    begin(lab, named("first", "ant", "bee"), "data.content_digest")


def test_changed_files_of_a_function_are_named(lab: Lab) -> None:
    """Also those of an own validation set; a file that is only written again is the same."""
    text = "import numpy as np\ndef load(path):\n    values = np.loadtxt(path)\n    return values[:, :6], values[:, 6]"
    (lab.code / "rows.py").write_text(text, encoding="utf-8")
    files = [lab.code / name for name in ("train.txt", "val.txt")]
    rows = "".join("1 2 3 4 5 6 0\n" for _ in range(9))
    sets = [{"source": "rows.py:load", "options": {"path": file.name}} for file in files]
    spec = spec_of("build", run="read", data__validation=sets[1], data__validation_fraction=0.0)
    data = spec.data.model_copy(update=sets[0])
    spec = spec.model_copy(update={"data": data})
    for file in files:
        file.write_text(rows)
    head = begin(lab, spec)
    for file in files:
        file.write_text(rows)
    assert begin(lab, spec) == head
    for file in files:
        file.write_text(rows.replace("1", "8"))
        with pytest.raises(IdentityChanged, match=f"{file.name}: changed since"):
            begin(lab, spec)
        file.write_text(rows)
    assert begin(lab, spec) == head
