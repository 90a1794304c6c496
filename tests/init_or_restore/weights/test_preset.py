"""A preset of KerasHub as initial weights: what `from_preset` loads, in the models that users make of a backbone."""

import json
import shutil
from pathlib import Path
from typing import Any

import keras
import keras_hub
import numpy as np
import pytest

from baton.tasks.foundation.contracts.run_spec import InitSpec
from baton.tasks.foundation.errors import WeightsError
from baton.tasks.init_or_restore.weights.loading import load_weights
from tests.support.event_recorder import EventRecorder
from tests.support.lab import Lab, built, lab_of, spec_of
from tests.support.weights_lab import values_of

MODEL = """
import keras_hub


def bert(name="body"):
    return keras_hub.models.BertBackbone(
        vocabulary_size=9, num_layers=1, num_heads=2, hidden_dim=4, intermediate_dim=8, max_sequence_length=6, name=name
    )


def compiled(model):
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def task(classes=2, rank=0):
    backbone = bert()
    if rank:
        backbone.enable_lora(rank)
    return compiled(keras_hub.models.BertTextClassifier(backbone, num_classes=classes))


def with_own_head():
    backbone = bert()
    return compiled(keras.Model(backbone.input, keras.layers.Dense(3, name="head")(backbone.output["pooled_output"])))


def inputs():
    return {name: keras.Input((6,), dtype="int32", name=name) for name in ("token_ids", "segment_ids", "padding_mask")}


def as_a_layer():
    x = inputs()
    return compiled(keras.Model(x, keras.layers.Dense(3, name="head")(bert("inner")(x)["pooled_output"])))


def t5():
    x = inputs()
    both = {f"{part}_{name}": x[name] for part in ("encoder", "decoder") for name in ("token_ids", "padding_mask")}
    body = keras_hub.models.T5Backbone(
        vocabulary_size=9, num_layers=1, num_heads=2, hidden_dim=4, intermediate_dim=8, dropout=0.0
    )
    return compiled(keras.Model(x, body(both)["decoder_sequence_output"][:, 0]))
"""

DATA = """
import numpy as np


def load(form):
    ids = np.arange(6, dtype="int32")
    for label in range(16):
        yield {"token_ids": ids, "segment_ids": 0 * ids, "padding_mask": 0 * ids + 1}, label % 2
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A lab with the presets of a task, of its backbone, and of one whose layers have no names of their own."""
    lab = lab_of(tmp_path_factory.mktemp("lab"), MODEL)
    (lab.code / "data.py").write_text(DATA)
    models: dict[str, Any] = {}
    exec(f"import keras\n{MODEL}", models)  # noqa: S102 - the same functions, in Keras alone
    keras.utils.set_random_seed(7)
    task = models["task"]()
    models["t5"]()  # the next one's automatic names have other numbers than in a new process
    t5 = models["t5"]()
    for variable in (*task.weights, *t5.weights):
        if variable.dtype == "float32":
            variable.assign(np.random.default_rng(len(variable.path)).normal(size=variable.shape))
    task.save_to_preset(str(lab.code / "task"))
    task.backbone.save_to_preset(str(lab.code / "body"))
    next(layer for layer in t5.layers if isinstance(layer, keras_hub.models.Backbone)).save_to_preset(
        str(lab.code / "t5")
    )
    return lab


def load(lab: Lab, build: str, source: Any, **options: Any) -> tuple[Any, Any]:
    state = built(lab, spec_of(build, model__options=options))
    return state, load_into(state, lab, source)


def load_into(state: Any, lab: Lab, source: Any) -> Any:
    init = InitSpec.model_validate({"weights": [source]})
    return load_weights(state, init, code_folder=lab.code, telemetry=EventRecorder())


def test_task_gets_what_from_preset_loads(lab: Lab) -> None:
    state, report = load(lab, "task", "task")
    expected = keras_hub.models.TextClassifier.from_preset(str(lab.code / "task"))
    assert [weight.path for weight in state.model.weights] == [weight.path for weight in expected.weights]
    for one, other in zip(state.model.weights, expected.weights, strict=True):
        assert "seed" in one.path or np.array_equal(one.numpy(), other.numpy()), one.path
    assert (report.sources[0].kind, report.left) == ("a preset of KerasHub", ())


@pytest.mark.parametrize("build", ["with_own_head", "as_a_layer"])
def test_backbone_gets_its_weights_below_a_new_head(lab: Lab, build: str) -> None:
    state, report = load(lab, build, {"source": "body", "exclude": ["head"]})
    assert report.left == ("head/kernel", "head/bias")
    expected = keras_hub.models.Backbone.from_preset(str(lab.code / "body"))
    found = [weight.numpy() for weight in state.model.weights if "head" not in weight.path]
    assert all(np.array_equal(*pair) for pair in zip(found, (w.numpy() for w in expected.weights), strict=True))


def test_preset_goes_under_lora(lab: Lab) -> None:
    state, report = load(lab, "task", {"source": "task", "exclude": ["*lora_kernel*"]}, rank=1)
    assert len(report.left) == 4
    assert all("lora_kernel" in path for path in report.left)
    plain_values = values_of(load(lab, "task", "task")[0])
    assert all(
        np.array_equal(value, plain_values[path]) for path, value in values_of(state).items() if path in plain_values
    )


def test_layers_without_own_names_are_loaded_by_position(lab: Lab) -> None:
    state, report = load(lab, "t5", "t5")
    expected = keras_hub.models.Backbone.from_preset(str(lab.code / "t5"))
    assert report.left == ()
    assert "by position" in report.sources[0].remarks[0]
    for one, other in zip(state.model.weights, expected.weights, strict=True):
        assert np.array_equal(one.numpy(), other.numpy()), one.path


def changed(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)


WRONG = {
    "not JSON": (lambda folder: changed(folder, "config.json", "{"), ["config.json is not that of a preset"]),
    "not of KerasHub": (lambda folder: changed(folder, "config.json", json.dumps({"a": 1})), ["registered_name"]),
    "shards": (
        lambda folder: (folder / "model.weights.h5").rename(folder / "model.weights.json"),
        ["model.weights.json in place of model.weights.h5", "max_shard_size=None"],
    ),
    "transformers": (
        lambda folder: (folder / "model.weights.h5").rename(folder / "model.safetensors"),
        ["model.safetensors in place of", "save_to_preset(another folder)"],
    ),
    "torn": (lambda folder: changed(folder, "model.weights.h5", "no"), ["cannot be read as Keras weights"]),
}  # fmt: skip


def test_unusable_presets_are_refused(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"logits/kernel is float32\[4, 3\](.|\n)*is float32\[4, 2\]"):
        load(lab, "task", "task", classes=3)
    state = built(lab, spec_of("task"))
    before = state.digest().root
    for case, (damage, words) in WRONG.items():
        shutil.copytree(lab.code / "task", tmp_path / case)
        damage(tmp_path / case)
        with pytest.raises(WeightsError) as refused:
            load_into(state, lab, str(tmp_path / case))
        assert [word for word in words if word not in str(refused.value)] == [], case
    assert state.digest().root == before
