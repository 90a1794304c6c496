"""Every kind of source, loaded into one model."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from baton.tasks.foundation.contracts.log_entry import Commit
from baton.tasks.foundation.contracts.run_spec import InitSpec
from baton.tasks.foundation.errors import WeightsError
from baton.tasks.foundation.storage.opening import open_storage
from baton.tasks.init_or_restore.weights.loading import load_weights
from tests.support.event_recorder import EventRecorder
from tests.support.lab import Lab, built, in_fresh_process, restored, spec_of
from tests.support.weights_lab import (
    SOURCE,
    WEIGHTS,
    fresh,
    load,
    others_of,
    refusal,
    same,
    values_of,
)

FORMS = {
    "kept.weights.h5": "an HDF5 file of Keras",
    "kept.keras": "a .keras file",
    "kept.h5": "an HDF5 file of Keras",
    "exported": "a SavedModel",
    "bare": "a TensorFlow checkpoint",
    "bare/ckpt": "a TensorFlow checkpoint",
    "graph/ckpt-1": "a TensorFlow checkpoint",
    "graph/ckpt-1.index": "a TensorFlow checkpoint",
    "weights.py:load": "a function",
}


@pytest.mark.parametrize("form", FORMS)
def test_every_kind_of_source_is_loaded_completely(lab: Lab, form: str) -> None:
    recorder = EventRecorder()
    state, report = load(lab, form, recorder=recorder)
    assert same(values_of(state), dict(np.load(lab.code / "weights.npz")))
    source = report.sources[0]
    assert source.kind == FORMS[form]
    assert (source.missing, source.unused, source.misfits, source.remarks, report.left) == ((), (), (), (), ())
    assert set(source.loaded) == set(values_of(state))
    assert recorder.warnings == []


def test_entries_that_are_not_weights_are_counted_only(lab: Lab) -> None:
    trained = len(fresh(lab).model.trainable_variables)
    before = others_of(fresh(lab))
    state, report = load(lab, "graph/ckpt-1")
    # step and save_counter; iteration, learning rate, and two slots per trained variable.
    assert report.sources[0].ignored == 2 + 2 + 2 * trained
    assert before
    assert same(before, others_of(state))


def test_equal_variables_without_names_stay_apart(lab: Lab) -> None:
    """A variable that its user does not name is called Variable, as every other one is."""
    root = tf.Module()
    for layer, weight in (("in", "bias"), ("norm", "beta")):
        setattr(root, layer, tf.Module())
        setattr(getattr(root, layer), weight, tf.Variable(tf.zeros(5)))
    tf.train.Checkpoint(root).write(str(lab.code / "unnamed" / "ckpt"))
    _, report = load(lab, {"source": "unnamed", "include": ["in/bias", "norm/beta"]})
    assert set(report.sources[0].loaded) == {"in/bias", "norm/beta"}


def test_a_checkpoint_of_tensorflow_1_is_refused(lab: Lab) -> None:
    message = refusal(lab, "named")
    assert "/named has no object graph, as a checkpoint of TensorFlow 1" in message
    assert "weights.py:load" in message


@pytest.mark.parametrize("form", ["kept.keras", "exported", "graph/ckpt-1", "weights.py:load"])
def test_new_head_on_a_pretrained_body(lab: Lab, form: str) -> None:
    message = refusal(lab, form, classes=4)
    assert "with another shape or dtype: 2 variables: head/kernel is float32[5, 4], head/" in message
    assert "is float32[5, 3]" in message
    body, report = load(lab, {"source": form, "exclude": ["head"]}, classes=4)
    assert report.left == ("head/kernel", "head/bias")
    assert report.sources[0].not_asked == 2
    fitting, lax = load(lab, {"source": form, "strict": False}, classes=4)
    assert len(lax.sources[0].misfits) == 2
    assert lax.digest == report.digest
    assert same(values_of(body), values_of(fitting))


def test_rename_and_partial_selection(lab: Lab) -> None:
    kept = dict(np.load(lab.code / "weights.npz"))
    for form in ("kept.weights.h5", "kept.h5", "exported", "weights.py:load"):
        state, report = load(
            lab, {"source": form, "include": ["logits/*"], "rename": {"logits": "head"}}, head="logits"
        )
        assert set(report.sources[0].loaded) == {"logits/kernel", "logits/bias"}
        assert np.array_equal(values_of(state)["logits/kernel"], kept["head/kernel"])
        assert len(report.left) == len(kept) - 2


def test_last_of_several_sources_wins(lab: Lab) -> None:
    head = lab.log(SOURCE).head()
    assert head is not None
    recorder = EventRecorder()
    run = {"source": "../storage/source", "include": ["encoder", "head/bias"]}
    state, report = load(lab, "kept.keras", run, recorder=recorder)
    trained = values_of(restored(lab, SOURCE, head.retained[-1]))
    kept = dict(np.load(lab.code / "weights.npz"))
    assert (
        "in/kernel" in report.sources[1].loaded
    )  # of the layer encoder/in, although its path does not begin with encoder
    from_run = {"in/kernel", "in/bias", "head/bias", *(path for path in kept if path.startswith("norm/"))}
    assert set(report.sources[1].loaded) == from_run
    for path, value in values_of(state).items():
        assert np.array_equal(value, (trained if path in from_run else kept)[path]), path
    assert set(report.overlaid) == from_run
    assert report.left == ()


def test_floating_dtypes_are_converted_and_reported(lab: Lab) -> None:
    kept = dict(np.load(lab.code / "weights.npz"))
    (lab.code / "half.py").write_text(
        WEIGHTS.replace("dict(np.load(", "half(np.load(")
        .replace("def load", "def half(kept):\n    return {k: kept[k].astype('float16') for k in kept}\n\n\ndef load")
        .replace('"weights.py"', '"half.py"')
    )
    state, report = load(lab, "half.py:load")
    assert len(report.sources[0].cast) == len(kept)
    assert "head/bias: float16 -> float32" in report.sources[0].cast
    assert np.array_equal(values_of(state)["head/kernel"], kept["head/kernel"].astype("float16").astype("float32"))
    text = (lab.code / "half.py").read_text()
    (lab.code / "whole.py").write_text(text.replace("float16", "int32").replace("half.py", "whole.py"))
    message = refusal(lab, {"source": "whole.py:load", "include": ["head/bias"]})
    assert "head/bias is float32[3], head/bias is int32[3]" in message


@pytest.mark.slow
def test_run_starts_with_weights_and_resumes_without_them(lab: Lab, tmp_path: Path) -> None:
    code = tmp_path / "code"
    shutil.copytree(lab.code, code)
    own = Lab(tmp_path, code)
    bad = spec_of("build", run="warm", init={"weights": "kept.keras"}, model__options={"classes": 4})
    own.prepare(bad)
    with pytest.raises(WeightsError):
        own.begin(bad)
    assert not (tmp_path / "storage" / "warm").exists()
    spec = spec_of("build", run="warm", init={"weights": ["kept.keras"]})
    head = own.begin(spec)
    commit = own.log(spec).entry(1).body
    assert isinstance(commit, Commit)
    assert commit.initialized_from is not None
    assert commit.initialized_from.sources[0].source == "kept.keras"
    assert head.tip is not None
    kept = dict(np.load(code / "weights.npz"))
    assert same(values_of(restored(own, spec, head.tip)), kept)
    (code / "kept.keras").unlink()
    assert own.begin(spec) == head
    # Killed between its first two entries, the run starts again.
    shutil.copy(lab.code / "kept.keras", code / "kept.keras")
    shutil.rmtree(tmp_path / "storage" / "warm" / "checkpoints")
    for name in ("00000001.json", "HINT"):
        (tmp_path / "storage" / "warm" / "log" / name).unlink(missing_ok=True)
    again = own.begin(spec)
    assert again.tip is not None
    assert again.tip.state_digest == head.tip.state_digest


@pytest.mark.usefixtures("cloud")
def test_sources_in_a_store_are_loaded(lab: Lab, tmp_path: Path) -> None:
    store = open_storage("gs://bucket/kept", relative_to=tmp_path)
    for name in ("kept.keras", "graph/ckpt-1.index", "graph/ckpt-1.data-00000-of-00001"):
        store.upload(lab.code / name, name)
    for path in (lab.code / "exported").rglob("*"):
        if path.is_file():
            store.upload(path, str(path.relative_to(lab.code)))
    home = lab.root / "storage" / "source"
    for path in home.rglob("*"):
        if path.is_file():
            store.upload(path, f"source/{path.relative_to(home)}")
    kept = dict(np.load(lab.code / "weights.npz"))
    for name in ("kept.keras", "graph/ckpt-1", "exported"):
        state, _ = load(lab, f"gs://bucket/kept/{name}")
        assert same(values_of(state), kept)
    _, report = load(lab, {"source": "gs://bucket/kept/source", "step": 0})
    assert report.sources[0].step == 0
    assert "gs://bucket/kept/none.keras does not exist" in refusal(lab, "gs://bucket/kept/none.keras")


def on_two_replicas(folder: str) -> dict[str, Any]:
    lab = Lab(Path(folder), Path(folder) / "code")
    spec = spec_of("build", run="two", replicas=2)
    values = {}
    for form in ("kept.weights.h5", "weights.py:load"):
        state = built(lab, spec)
        load_weights(state, InitSpec.model_validate({"weights": form}), code_folder=lab.code, telemetry=lab.recorder)
        values[form] = {
            leaf.path.removeprefix("model/"): [each.numpy().tolist() for each in leaf.components]
            for leaf in state.leaves
            if leaf.path.startswith("model/") and not leaf.seed
        }
    # By position, through Keras.
    other = built(lab, spec.model_copy(update={"model": spec.model.model_copy(update={"options": {"head": "logits"}})}))
    report = load_weights(
        other, InitSpec.model_validate({"weights": "kept.keras"}), code_folder=lab.code, telemetry=lab.recorder
    )
    assert report is not None
    return {
        "values": values,
        "remarks": report.sources[0].remarks,
        "components": sorted({len(leaf.components) for leaf in other.leaves}),
    }


@pytest.mark.slow
def test_every_replica_gets_the_weights(lab: Lab) -> None:
    result = in_fresh_process(on_two_replicas, folder=str(lab.root))
    kept = dict(np.load(lab.code / "weights.npz"))
    for values in result["values"].values():
        assert values.keys() == kept.keys()
        for path, parts in values.items():
            assert len(parts) == 2
            for each in parts:
                assert np.array_equal(np.array(each, np.float32), kept[path]), path
    assert "matched by position" in result["remarks"][0]
    assert result["components"] == [2]
