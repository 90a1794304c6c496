"""What a model keeps beside its variables follows them, or is part of the run's identity."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows.api import Run, run
from tasks.foundation.errors import BatonError
from tasks.foundation.state.warm_state import PROCESS_STATE
from tests.support import forked
from tests.support.lab import Lab, lab_of, spec_of

pytestmark = pytest.mark.slow

NORMALIZED = """
import numpy as np


class Doubled(keras.layers.Normalization):
    def finalize_state(self):
        super().finalize_state()
        if self.built:
            self.factor = 2.0 / ops.sqrt(ops.reshape(self.adapt_variance, (1, -1)))

    def call(self, x):
        return super().call(x) * self.factor


def build(rate=0.0, adapt=False, layer="Normalization"):
    kind = Doubled if layer == "Doubled" else keras.layers.Normalization
    normalization = kind(name="normalization")
    if adapt:
        normalization.adapt(np.load("stats.npy"))
    model = keras.Sequential([keras.Input((6,)), normalization, keras.layers.Dense(3, "softmax", name="dense")])
    model.compile(keras.optimizers.SGD(rate), "sparse_categorical_crossentropy")
    return model
"""


def examples() -> tuple[Any, Any]:
    from tests.support.zoo import data

    rows = list(data.load())
    return np.stack([x for x, _ in rows]), np.array([y for _, y in rows])


def trained_by_keras(folder: Path, kind: str) -> tuple[str, float]:
    """A model whose statistics are far from 0 and 1, saved as a file; and its loss on all examples."""
    import keras

    x, y = examples()
    keras.utils.set_random_seed(1)
    layer = keras.layers.Normalization(name="normalization")
    layer.adapt(10 * x + 50)
    model = keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(3, "softmax", name="dense")])
    model.compile(keras.optimizers.SGD(0.05), "sparse_categorical_crossentropy")
    model.fit(10 * x + 50, y, epochs=2, verbose=0)
    file = folder / f"source.{kind}"
    model.save(file) if kind == "keras" else model.save_weights(file)
    return str(file), float(model.evaluate(x, y, verbose=0))


def losses_of(lab: Lab, spec: Any) -> list[float]:
    """The loss on all examples: by the evaluation of the run, by `Run.model`, and by the exported file."""
    import keras

    x, y = examples()
    head = lab.relay(spec, 2, cold=True)
    assert head.tip is not None
    found = [lab.evaluate(spec, head.tip)["loss"]]
    run = Run(lab.home(spec).uri)
    models = [run.model(), keras.saving.load_model(run.export(lab.root / f"{spec.run}.keras"))]
    return found + [float(model.evaluate(x, y, verbose=0)) for model in models]


@pytest.mark.parametrize("kind", ["keras", "weights.h5"])
def test_normalization_computes_with_the_weights_it_was_given(tmp_path: Path, kind: str) -> None:
    lab = lab_of(tmp_path, NORMALIZED)
    source, expected = trained_by_keras(tmp_path, kind)
    data = {"data__validation": "data.py:load", "data__validation_fraction": 0}
    spec = spec_of("build", run="first", init__weights=source, **data)
    assert losses_of(lab, spec) == pytest.approx([expected] * 3, rel=1e-6)
    again = spec_of("build", run="second", init__weights=lab.home(spec).uri, **data)
    assert losses_of(lab, again) == pytest.approx([expected] * 3, rel=1e-6)


@pytest.mark.parametrize("layer", ["Normalization", "Doubled"])
def test_statistics_of_a_resumed_run_are_the_checkpoints(
    tmp_path: Path, layer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = lab_of(tmp_path, NORMALIZED)
    monkeypatch.chdir(lab.code)
    x, _ = examples()
    digests = []
    for name, grows in (("straight", False), ("cut", True)):
        spec = spec_of("build", run=name, model__options={"rate": 0.1, "adapt": True, "layer": layer})
        np.save("stats.npy", x)
        lab.relay(spec, 2, cold=True)
        if grows:
            np.save("stats.npy", 3 * x + 8)
            PROCESS_STATE.forget()
        head = lab.relay(spec, 5, cold=True)
        assert head.tip is not None
        digests.append(head.tip.state_digest)
    assert digests[0] == digests[1]
    assert lab.recorder.warnings == []


SET_ORDER = """
WORDS = [f"w{each}" for each in range(12)]


class Index(keras.layers.Layer):
    def __init__(self):
        super().__init__(name="index")
        words = tf.constant(list(set(WORDS)))
        numbers = tf.range(len(words), dtype=tf.int64)
        self.table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(words, numbers), -1)

    def call(self, x):
        return x + 0.01 * tf.cast(self.table.lookup(tf.constant(["w0", "w1", "w2", "w3", "w4", "w5"])), tf.float32)


def build():
    model = keras.Sequential([keras.Input((6,)), Index(), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""


def trained(file: Path, name: str, *words: str, seed: str | None) -> dict[str, Any]:
    """Train in a process with this hash seed; None: without the variable."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
    environment |= {} if seed is None else {"PYTHONHASHSEED": seed}
    command = [sys.executable, "-P", "-m", "flows.without_prefect", str(file), "--set", f"run={name}", *words]
    done = forked.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in {0, 3}, done.stderr[-3000:]
    assert "sets have another order" not in done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_all_processes_of_a_run_order_sets_alike(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, SET_ORDER)
    spec = spec_of("build", run="any", train__segment_steps=4, storage=str(tmp_path / "runs"))
    file = lab.code / "run.yaml"
    file.write_text(spec.model_dump_json(exclude_defaults=True), encoding="utf-8")
    straight = trained(file, "straight", seed="1")
    for seed in ("1", None):
        trained(file, "other", "--max-segments", "1", seed=seed)
    assert trained(file, "other", seed="2")["state_digest"] == straight["state_digest"]
    default = trained(file, "default", seed=None)
    assert default["state_digest"] != straight["state_digest"]
    home = tmp_path / "runs" / "default" / "log" / "00000000.json"
    assert json.loads(home.read_text())["body"]["environment"]["hash_seed"] == 0
    # A notebook trains in a process of its own, with the run's seed.
    trained(file, "notebook", "--max-segments", "1", seed="1")
    assert run(file, run="notebook").history() == run(file, run="straight").history()
    # Its own process has another order of the set, by which it cannot build the model.
    program = "import sys; from flows.api import Run; Run(sys.argv[1]).model()"
    for seed, refused in (("1", False), ("7", True)):
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "runs" / "other")],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode != 0) == refused, done.stderr[-2000:]
    assert "table `table` of layer `index` changed: " in done.stderr
    assert "hint: sets have another order in this process; start it with PYTHONHASHSEED=1" in done.stderr


OF_WORDS = {
    "model.py": """
import keras


def build_model():
    layer = keras.layers.TextVectorization(output_sequence_length=3, name="words")
    with open("corpus.txt") as file:
        layer.adapt(file.read().splitlines())
    text = keras.Input((), dtype="string")
    hidden = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(20, 4)(layer(text)))
    model = keras.Model(text, keras.layers.Dense(2, "softmax")(hidden))
    model.compile("adam", "sparse_categorical_crossentropy")
    return model
""",
    "data.py": """
def load():
    for number in range(60):
        yield ("red green red" if number % 2 else "blue green blue"), number % 2
""",
    "run.yaml": """
run: words
storage: ./runs
data: {source: data.py:load, validation_fraction: 0.2}
model: model.py:build_model
train: {steps: 8, segment_steps: 4, global_batch_size: 8, log_every_steps: 4}
accelerator: {kind: cpu}
""",
    "corpus.txt": "red green\nred green\nred blue\n",
}


def test_run_keeps_the_vocabulary_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import keras

    for name, text in OF_WORDS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    corpus = tmp_path / "corpus.txt"
    monkeypatch.chdir(tmp_path)

    def baton(*words: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-P", "-m", *words]
        return forked.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    continues = ("flows.without_prefect", "run.yaml")
    exports = ("flows.commands.main", "export", "run.yaml", "--format", "keras", "--to", "words.keras")
    assert baton(*continues, "--max-segments", "1").returncode == 3
    corpus.write_text(OF_WORDS["corpus.txt"] + "new blue\n" * 9, encoding="utf-8")
    for command in (continues, exports, ("flows.commands.main", "evaluate", "run.yaml")):
        refused = baton(*command)
        assert refused.returncode == 2, refused.stderr
        assert "vocabulary of layer `words` changed: it has 4 tokens instead of 3; token 2 was 'red', is 'blue'" in (
            " ".join(refused.stderr.split())
        )
    with pytest.raises(BatonError, match="vocabulary of layer `words` changed"):
        run("run.yaml")
    assert not (tmp_path / "words.keras").exists()
    corpus.write_text(OF_WORDS["corpus.txt"], encoding="utf-8")
    assert baton(*continues).returncode == 0
    assert baton(*exports).returncode == 0
    layer = keras.saving.load_model("words.keras").get_layer("words")
    assert layer.get_vocabulary() == ["", "[UNK]", "red", "green", "blue"]
