"""Every kind of source, read into one model; and what is said of sources that do not fit."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tensorflow as tf

from tasks.foundation.contracts.log_entry import Commit, Rewind
from tasks.foundation.contracts.run_spec import InitSpec, RunSpec
from tasks.foundation.contracts.weights_report import WeightsReport
from tasks.foundation.errors import InvalidInput, WeightsError
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.local import LocalStorage
from tasks.foundation.storage.opening import open_storage
from tasks.init_or_restore.weights.loading import load_weights
from tasks.init_or_restore.weights.run_checkpoint import read_run
from tests.support.lab import Heard, Lab, built, in_fresh_process, lab_of, restored, spec_of

MODEL = """
class Block(keras.layers.Layer):
    def __init__(self, width, **config):
        super().__init__(**config)
        self.first = keras.layers.Dense(width)
        self.others = [keras.layers.Dense(width), keras.layers.Dense(width)]

    def build(self, shape):
        self.scale = self.add_weight(shape=(1,), name="scale", initializer="ones")
        for layer in (self.first, *self.others):
            layer.build(shape)
            shape = layer.compute_output_shape(shape)
        super().build(shape)

    def call(self, x):
        for layer in (self.first, *self.others):
            x = layer(x)
        return x * self.scale


def build(classes=3, head="head", between=False, after=False):
    inner = keras.Input((6,))
    y = keras.layers.Dense(5, name="in")(inner)
    encoder = keras.Model(inner, keras.layers.BatchNormalization(name="norm")(y), name="encoder")
    x = keras.Input((6,))
    y = encoder(x)
    y = keras.Sequential([keras.layers.Dense(5), keras.layers.Dropout(0.5)], name="stack")(y)
    if between:
        y = keras.layers.Dense(5, name="between")(y)
    y = Block(5, name="block")(y)
    y = keras.layers.Dense(classes, name=head)(y)
    if after:
        y = keras.layers.BatchNormalization(name="after")(y)
    model = keras.Model(x, y)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model
"""
SUBCLASSED = """
class KeptOtherwise(keras.layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), name="w")

    def call(self, x):
        return x * self.w

    def save_own_variables(self, store):
        store["doubled"] = 2 * self.w.numpy()

    def load_own_variables(self, store):
        self.w.assign(store["doubled"][()] / 2)


class OwnModel(keras.Model):
    def __init__(self):
        super().__init__(name="own_model")
        self.left = keras.layers.Dense(4, name="left")
        self.stack = [keras.layers.Dense(4, name="one"), keras.layers.Dense(4, name="two")]
        self.named = {"head": keras.layers.Dense(3, name="out")}
        self.otherwise = KeptOtherwise(name="kept_otherwise")

    def call(self, x):
        x = self.left(x)
        for layer in self.stack:
            x = layer(x)
        return self.named["head"](self.otherwise(x))


def build():
    model = OwnModel()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""
WEIGHTS = """
import numpy as np


def load():
    return dict(np.load(__file__.replace("weights.py", "weights.npz")))


def raising():
    raise KeyError("bucket")


def listing():
    return [1.0]


def texts():
    return {"head/bias": "zeros"}
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A lab with one set of weights, kept in every form."""
    lab = lab_of(tmp_path_factory.mktemp("lab"), MODEL)
    state = randomized(lab, SOURCE)
    model, folder = state.model, lab.code
    values = values_of(state)
    for variable in model.optimizer.variables:
        variable.assign(variable + 1)
    model.save_weights(folder / "kept.weights.h5")
    model.save(folder / "kept.keras")
    model.save(folder / "kept.h5")
    model.export(folder / "exported", verbose=False)
    tf.train.Checkpoint(model).write(str(folder / "bare" / "ckpt"))
    tf.train.Checkpoint(step=tf.Variable(7), net=model, opt=model.optimizer).save(str(folder / "graph" / "ckpt"))
    names = [f"model/{path}" for path in values] + ["global_step", "model/head/bias/Adam"]
    tensors = [*values.values(), np.int64(3), np.zeros(3)]
    (folder / "named").mkdir()
    tf.raw_ops.SaveV2(
        prefix=str(folder / "named" / "model.ckpt-3"),
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=tensors,
    )
    np.savez(folder / "weights.npz", **values)
    (folder / "weights.py").write_text(WEIGHTS)
    head = lab.begin(SOURCE)
    lab.train_and_commit(SOURCE, 3)
    assert head.tip is not None
    return lab


SOURCE = spec_of("build", run="source", train__seed=5)


def randomized(lab: Lab, spec: RunSpec) -> Any:
    state = built(lab, spec)
    draw = np.random.default_rng(3)
    for variable in state.model.variables:
        if variable.dtype == "float32":
            variable.assign(draw.normal(size=variable.shape))
    return state


def values_of(state: Any) -> dict[str, Any]:
    return {
        leaf.path.removeprefix("model/"): leaf.components[0].numpy()
        for leaf in state.leaves
        if leaf.path.startswith("model/") and not leaf.seed
    }


STATES: dict[str, tuple[Any, list[tuple[Any, Any]]]] = {}


def fresh(lab: Lab, **options: Any) -> Any:
    """A state at its initial values; building one takes a second, so there is one for each set of options."""
    key = str(options)
    if key not in STATES:
        state = built(lab, spec_of("build", model__options=options))
        STATES[key] = state, [(each, each.numpy()) for leaf in state.leaves for each in leaf.components]
    state, initial = STATES[key]
    for each, value in initial:
        each.assign(value)
    return state


def load(lab: Lab, *sources: Any, heard: Heard | None = None, **options: Any) -> tuple[Any, WeightsReport]:
    state = fresh(lab, **options)
    init = InitSpec.model_validate({"weights": list(sources)})
    report = load_weights(state, init, code_folder=lab.code, telemetry=heard or lab.heard)
    assert report is not None
    return state, report


def refusal(lab: Lab, *sources: Any, **options: Any) -> str:
    with pytest.raises(WeightsError) as refused:
        load(lab, *sources, **options)
    assert refused.value.exit_code == 2
    return str(refused.value)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[path], other[path]) for path in one)


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
def test_each_form_is_loaded_whole(lab: Lab, form: str) -> None:
    heard = Heard()
    state, report = load(lab, form, heard=heard)
    assert same(values_of(state), dict(np.load(lab.code / "weights.npz")))
    source = report.sources[0]
    assert source.kind == FORMS[form]
    assert (source.missing, source.unused, source.misfits, source.remarks, report.left) == ((), (), (), (), ())
    assert set(source.loaded) == set(values_of(state))
    assert heard.warnings == []


def test_what_is_no_weight_is_counted_and_not_loaded(lab: Lab) -> None:
    trained = len(fresh(lab).model.trainable_variables)
    before = others_of(fresh(lab))
    state, report = load(lab, "graph/ckpt-1")
    # step and save_counter; iteration, learning rate and two slots for each trained variable.
    assert report.sources[0].ignored == 2 + 2 + 2 * trained
    assert before
    assert same(before, others_of(state))


def others_of(state: Any) -> dict[str, Any]:
    return {
        leaf.path: leaf.components[0].numpy()
        for leaf in state.leaves
        if leaf.seed or not leaf.path.startswith("model/")
    }


def test_names_of_tensorflow_1_are_related_by_a_renaming_or_by_their_ends(lab: Lab) -> None:
    kept = dict(np.load(lab.code / "weights.npz"))
    state, report = load(lab, {"source": "named/model.ckpt-3", "rename": {"": "model"}})
    assert same(values_of(state), kept)
    assert report.sources[0].loaded["head/bias"] == "model/head/bias"
    assert (report.sources[0].ignored, report.sources[0].remarks) == (2, ())
    heard = Heard()
    state, report = load(lab, "named", heard=heard)
    assert same(values_of(state), kept)
    assert len(heard.warnings) == 1
    assert f"named: by the ends of their names: {next(iter(kept))} from model/{next(iter(kept))}" in heard.warnings[0]


def test_another_run_gives_its_newest_checkpoint_or_the_one_that_is_named(lab: Lab) -> None:
    head = lab.log(SOURCE).head()
    assert head is not None
    home = "../storage/source"
    for step, ref in ((None, head.retained[-1]), (0, head.retained[0]), (3, head.retained[-1])):
        state, report = load(lab, {"source": home, "step": step} if step is not None else home)
        assert same(values_of(state), values_of(restored(lab, SOURCE, ref)))
        assert (report.sources[0].step, report.sources[0].kind) == (ref.step, "a Baton run")
        assert report.sources[0].place == f"{lab.root}/storage/source/{ref.path}"
        assert state.step == 0
    assert "retains no checkpoint at step 2; it has: 0, 3" in refusal(lab, {"source": home, "step": 2})
    assert "has no best checkpoint" in refusal(lab, {"source": home, "step": "best"})


class Retires(LocalStorage):
    """A run's home on which, while a checkpoint is being read, the run goes back to step 0 and deletes it."""

    def read(self, path: str) -> bytes:
        if path.endswith("manifest.json") and self.exists(path):
            head = RunLog(LocalStorage(self.root)).require_head()
            first, newest = head.retained[0], head.retained[-1]
            body = Rewind(to=first, blown_up_at=3, reason="loss", skip_batches=1)
            if path.startswith(newest.path) and newest != first:
                RunLog(LocalStorage(self.root)).append(lambda _: body, attempt="a")
                self.delete(newest.path)
        return super().read(path)


@pytest.mark.parametrize("step", [None, 3])
def test_a_checkpoint_that_is_retired_while_it_is_read(lab: Lab, tmp_path: Path, step: int | None) -> None:
    shutil.copytree(lab.root / "storage" / "source", tmp_path / "live")
    live = Retires(tmp_path / "live")
    into = tmp_path / "here"
    if step is not None:
        with pytest.raises(WeightsError, match=r"step 3 was retired while it was being read.*it now has: 0"):
            read_run(live, step, into)
        return
    found = read_run(live, step, into)
    assert found.step == 0
    assert found.variables


def test_layers_of_other_names_are_related_by_their_places_where_the_file_fits_as_a_whole(lab: Lab) -> None:
    """As in a notebook, where automatic names have counted on."""
    heard = Heard()
    before = others_of(fresh(lab, head="logits"))
    state, report = load(lab, "kept.weights.h5", head="logits", heard=heard)
    assert same(others_of(state), before)  # which Keras would load as well
    kept = dict(np.load(lab.code / "weights.npz"))
    assert np.array_equal(values_of(state)["logits/kernel"], kept["head/kernel"])
    assert report.sources[0].remarks == (
        "layers were related by their places, as model.load_weights does, since their names differ",
    )
    assert any("related by their places" in text for text in heard.warnings)
    assert report.left == ()
    told = refusal(lab, {"source": "kept.weights.h5", "exclude": ["*/nothing", "block"]}, head="logits")
    assert "exclude: */nothing matches no variable" in told
    told = refusal(lab, {"source": "kept.weights.h5", "exclude": ["block"]}, head="logits")
    assert "not in the source: 2 variables: logits/kernel, logits/bias" in told
    assert "in the source and not in the model: 2 variables: head/0, head/1" in told


def test_a_file_without_names_of_layers_is_taken_as_a_whole_or_by_its_own_keys(lab: Lab) -> None:
    """As Keras wrote them before 3.6: dense_1 in such a key is a place, and may be another layer's name here."""
    shutil.copy(lab.code / "kept.weights.h5", lab.code / "old.weights.h5")
    with h5py.File(lab.code / "old.weights.h5", "a") as file:
        file.visititems(lambda _, item: item.attrs.pop("name", None) and None)
    state, report = load(lab, "old.weights.h5")
    assert same(values_of(state), dict(np.load(lab.code / "weights.npz")))
    assert "related by their places" in report.sources[0].remarks[0]
    head = {"source": "old.weights.h5", "include": ["head"]}
    assert "not in the source: 2 variables: head/kernel, head/bias" in refusal(lab, head)
    keys = {"head/kernel": "layers/dense/vars/0", "head/bias": "layers/dense/vars/1"}
    _, report = load(lab, head | {"rename": keys})
    assert report.sources[0].loaded == keys


def test_models_of_the_user_s_own_making(tmp_path: Path) -> None:
    own = lab_of(tmp_path, SUBCLASSED)
    source, spec = built(own, spec_of("build", train__seed=3)), spec_of("build")
    source.model.save_weights(own.code / "own.weights.h5")
    kept = values_of(source)
    assert {"own_model/left/kernel", "own_model/kept_otherwise/w"} <= kept.keys(), sorted(kept)
    state = built(own, spec)
    assert not same(values_of(state), kept)
    init = {"weights": "own.weights.h5"}
    report = load_weights(state, InitSpec.model_validate(init), code_folder=own.code, telemetry=own.heard)
    assert report is not None
    assert same(values_of(state), kept)
    # What a layer saves in a form of its own has no name in the file that could be the variable's.
    part = {"source": "own.weights.h5", "exclude": ["*otherwise*"]}
    state = built(own, spec)
    report = load_weights(state, InitSpec.model_validate({"weights": part}), code_folder=own.code, telemetry=own.heard)
    assert report is not None
    assert report.left == ("own_model/kept_otherwise/w",)


def test_a_file_with_a_layer_more_or_less_is_not_related_by_places(lab: Lab) -> None:
    told = refusal(lab, "kept.weights.h5", between=True)
    assert "not in the source: 2 variables: between/kernel, between/bias" in told
    longer = fresh(lab, after=True)
    longer.model.save_weights(lab.code / "longer.weights.h5")
    told = refusal(lab, "longer.weights.h5")  # of which Keras would say nothing
    assert "in the source and not in the model: 4 variables: after/0, after/1" in told
    state, report = load(lab, {"source": "kept.weights.h5", "strict": False}, between=True)
    assert report.left == report.sources[0].missing == ("between/kernel", "between/bias")
    kept = dict(np.load(lab.code / "weights.npz"))
    assert same({path: value for path, value in values_of(state).items() if path in kept}, kept)


@pytest.mark.parametrize("form", ["kept.keras", "exported", "graph/ckpt-1", "weights.py:load"])
def test_a_new_head_on_a_known_body(lab: Lab, form: str) -> None:
    told = refusal(lab, form, classes=4)
    assert "of another shape or type: 2 variables: head/kernel is float32[5, 4], head/" in told
    assert "is float32[5, 3]" in told
    body, report = load(lab, {"source": form, "exclude": ["head"]}, classes=4)
    assert report.left == ("head/kernel", "head/bias")
    assert report.sources[0].not_asked == 2
    fitting, lax = load(lab, {"source": form, "strict": False}, classes=4)
    assert len(lax.sources[0].misfits) == 2
    assert lax.digest == report.digest
    assert same(values_of(body), values_of(fitting))


def test_renamed_and_only_in_part(lab: Lab) -> None:
    kept = dict(np.load(lab.code / "weights.npz"))
    for form in ("kept.weights.h5", "kept.h5", "exported", "weights.py:load"):
        state, report = load(
            lab, {"source": form, "include": ["logits/*"], "rename": {"logits": "head"}}, head="logits"
        )
        assert set(report.sources[0].loaded) == {"logits/kernel", "logits/bias"}
        assert np.array_equal(values_of(state)["logits/kernel"], kept["head/kernel"])
        assert len(report.left) == len(kept) - 2


def test_layers_come_from_several_sources_and_the_last_one_holds(lab: Lab) -> None:
    head = lab.log(SOURCE).head()
    assert head is not None
    heard = Heard()
    run = {"source": "../storage/source", "include": ["encoder", "head/bias"]}
    state, report = load(lab, "kept.keras", run, heard=heard)
    trained = values_of(restored(lab, SOURCE, head.retained[-1]))
    kept = dict(np.load(lab.code / "weights.npz"))
    assert "in/kernel" in report.sources[1].loaded  # encoder/in, though its path does not say so
    from_run = {"in/kernel", "in/bias", "head/bias", *(path for path in kept if path.startswith("norm/"))}
    assert set(report.sources[1].loaded) == from_run
    for path, value in values_of(state).items():
        assert np.array_equal(value, (trained if path in from_run else kept)[path]), path
    assert set(report.overlaid) == from_run
    assert report.left == ()


def test_floating_types_are_converted_and_said(lab: Lab) -> None:
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
    told = refusal(lab, {"source": "whole.py:load", "include": ["head/bias"]})
    assert "head/bias is float32[3], head/bias is int32[3]" in told


def test_bfloat16_in_hdf5(lab: Lab) -> None:
    policy = keras_policy("bfloat16")
    try:
        model = tf.keras.Sequential([tf.keras.Input((5,)), tf.keras.layers.Dense(3, name="head", dtype="bfloat16")])
        model.save_weights(lab.code / "low.weights.h5")
    finally:
        keras_policy(policy)
    state, report = load(lab, {"source": "low.weights.h5", "include": ["head"]})
    assert report.sources[0].cast == ("head/kernel: bfloat16 -> float32", "head/bias: bfloat16 -> float32")
    assert np.array_equal(values_of(state)["head/kernel"], model.layers[0].kernel.numpy().astype("float32"))


def keras_policy(policy: Any) -> Any:
    before = tf.keras.config.dtype_policy()
    tf.keras.config.set_dtype_policy(policy)
    return before


def cut_short(lab: Lab) -> str:
    shutil.copytree(lab.code / "graph", lab.code / "cut", dirs_exist_ok=True)
    file = lab.code / "cut" / "ckpt-1.data-00000-of-00001"
    file.write_bytes(file.read_bytes()[:100])
    return "cut"


def without_data(lab: Lab) -> str:
    (lab.code / "bodiless").mkdir(exist_ok=True)
    shutil.copy(lab.code / "graph" / "ckpt-1.index", lab.code / "bodiless" / "ckpt-1.index")
    return "bodiless/ckpt-1"


def two_checkpoints(lab: Lab) -> str:
    for name in ("a-1", "b-2"):
        (lab.code / "two").mkdir(exist_ok=True)
        (lab.code / "two" / f"{name}.index").touch()
    return "two/"


def written(name: str) -> Callable[[Lab], str]:
    def write(lab: Lab) -> str:
        (lab.code / name).write_bytes(b"no weights at all")
        return name

    return write


def checkpoint_of_a_run(lab: Lab) -> str:
    head = lab.log(SOURCE).head()
    assert head is not None
    assert head.tip is not None
    return str(lab.folder(SOURCE, head.tip))


def empty_folder(lab: Lab) -> str:
    (lab.code / "empty").mkdir(exist_ok=True)
    return "empty"


WRONG: dict[str, tuple[Any, list[str]]] = {
    "missing": ("nowhere.keras", ["nothing is at", "nowhere.keras; ", "kept.keras"]),
    "unknown": (written("weights.bin"), ["is a file of no known kind; name a .weights.h5"]),
    "no hdf5": (written("torn.weights.h5"), ["torn.weights.h5 cannot be read as weights of Keras", "save them again"]),
    "no archive": (written("torn.keras"), ["torn.keras cannot be read as weights of Keras"]),
    "empty folder": (empty_folder, ["holds no weights of a known kind"]),
    "two checkpoints": (two_checkpoints, ["holds 2 checkpoints (a-1, b-2); name one of them, as two/b-2"]),
    "checkpoint cut short": (cut_short, ["cannot be read as a checkpoint of TensorFlow", "all its files are there"]),
    "checkpoint without data": (without_data, ["cannot be read as a checkpoint of TensorFlow"]),
    "within a run": (checkpoint_of_a_run, ["is a checkpoint of a Baton run; name the run's home, and its step"]),
    "no function": ("weights.py:lode", ["weights.py defines no function lode; it has: load"]),
    "no file": ("weight.py:load", ["weight.py is not there"]),
    "raising": ("weights.py:raising", ["weights.py:raising raised KeyError: 'bucket' (weights.py, line 10)"]),
    "listing": ("weights.py:listing", ["returned list; return a dict of arrays"]),
    "texts": ("weights.py:texts", ["returned 'head/bias': str; return a dict of arrays"]),
    "step": ({"source": "kept.keras", "step": 3}, ["is a .keras file, and step: 3 is for Baton runs; leave it out"]),
    "include": ({"source": "kept.keras", "include": ["hed/*"]}, ["include: hed/* matches no variable; near it: head"]),
    "rename": ({"source": "kept.keras", "rename": {"hed": "x"}}, ["rename: hed: x: the model has no variable hed"]),
    "renamed away": (
        {"source": "kept.keras", "rename": {"head": "top"}},
        ["not in the source: 2 variables: head/kernel, head/bias", "in the source and not in the model: 2 variables"],
    ),
    "address": ("ftp://host/kept.keras", ["ftp:// is unknown"]),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_sources_that_cannot_be_used_are_refused(lab: Lab, case: str) -> None:
    source, words = WRONG[case]
    state = fresh(lab)
    before = state.digest()
    init = InitSpec.model_validate({"weights": ["kept.keras", source(lab) if callable(source) else source]})
    with pytest.raises(InvalidInput) as refused:
        load_weights(state, init, code_folder=lab.code, telemetry=lab.heard)
    assert refused.value.exit_code == 2
    for word in words:
        assert word in str(refused.value)
    assert state.digest() == before


@pytest.mark.slow
def test_a_run_is_begun_with_them_and_goes_on_without(lab: Lab, tmp_path: Path) -> None:
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
    # Killed between its first two entries, it begins anew.
    shutil.copy(lab.code / "kept.keras", code / "kept.keras")
    shutil.rmtree(tmp_path / "storage" / "warm" / "checkpoints")
    for name in ("00000001.json", "HINT"):
        (tmp_path / "storage" / "warm" / "log" / name).unlink(missing_ok=True)
    again = own.begin(spec)
    assert again.tip is not None
    assert again.tip.state_digest == head.tip.state_digest


@pytest.mark.usefixtures("cloud")
def test_sources_lie_on_a_store_too(lab: Lab, tmp_path: Path) -> None:
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
    assert "nothing is at gs://bucket/kept/none.keras" in refusal(lab, "gs://bucket/kept/none.keras")


def on_two_replicas(folder: str) -> dict[str, Any]:
    lab = Lab(Path(folder), Path(folder) / "code")
    spec = spec_of("build", run="two", replicas=2)
    told = {}
    for form in ("kept.weights.h5", "weights.py:load"):
        state = built(lab, spec)
        load_weights(state, InitSpec.model_validate({"weights": form}), code_folder=lab.code, telemetry=lab.heard)
        told[form] = {
            leaf.path.removeprefix("model/"): [each.numpy().tolist() for each in leaf.components]
            for leaf in state.leaves
            if leaf.path.startswith("model/") and not leaf.seed
        }
    # By places, through Keras.
    other = built(lab, spec.model_copy(update={"model": spec.model.model_copy(update={"options": {"head": "logits"}})}))
    report = load_weights(
        other, InitSpec.model_validate({"weights": "kept.keras"}), code_folder=lab.code, telemetry=lab.heard
    )
    assert report is not None
    return {
        "values": told,
        "remarks": report.sources[0].remarks,
        "components": sorted({len(leaf.components) for leaf in other.leaves}),
    }


@pytest.mark.slow
def test_every_replica_gets_them(lab: Lab) -> None:
    told = in_fresh_process(on_two_replicas, folder=str(lab.root))
    kept = dict(np.load(lab.code / "weights.npz"))
    for values in told["values"].values():
        assert values.keys() == kept.keys()
        for path, parts in values.items():
            assert len(parts) == 2
            for each in parts:
                assert np.array_equal(np.array(each, np.float32), kept[path]), path
    assert "related by their places" in told["remarks"][0]
    assert told["components"] == [2]
