"""What a model keeps beside its variables follows them, or is part of the run's identity."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.flows.api import Run, run
from baton.flows.commands.main import main
from baton.tasks.foundation.errors import BatonError
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from tests.support import forked
from tests.support.homes import read_history, tip_of
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


def build(rate=0.0, adapt=False, doubled=False):
    normalization = (Doubled if doubled else keras.layers.Normalization)(name="normalization")
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


def trained_by_keras(file: Path) -> float:
    """Save a model whose statistics are far from 0 and 1; returns its loss on all examples."""
    import keras

    x, y = examples()
    keras.utils.set_random_seed(1)
    layer = keras.layers.Normalization(name="normalization")
    layer.adapt(10 * x + 50)
    model = keras.Sequential([keras.Input((6,)), layer, keras.layers.Dense(3, "softmax", name="dense")])
    model.compile(keras.optimizers.SGD(0.05), "sparse_categorical_crossentropy")
    model.fit(10 * x + 50, y, epochs=2, verbose=0)
    model.save(file)
    return float(model.evaluate(x, y, verbose=0))


def losses_of(lab: Lab, spec: Any) -> list[float]:
    """The loss on all examples: by the evaluation of the run, and by `Run.model`."""
    x, y = examples()
    head = lab.relay(spec, 2, cold=True)
    assert head.tip is not None
    model = Run(lab.home(spec).uri).model()
    return [lab.evaluate(spec, head.tip)["loss"], float(model.evaluate(x, y, verbose=0))]


def test_normalization_computes_with_the_weights_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import keras

    lab, source = lab_of(tmp_path, NORMALIZED), tmp_path / "source.keras"
    expected = trained_by_keras(source)
    data = {"data__validation": "data.py:load", "data__validation_fraction": 0}
    spec = spec_of("build", run="first", init__weights=str(source), **data)
    assert losses_of(lab, spec) == pytest.approx([expected] * 2, rel=1e-6)
    again = spec_of("build", run="second", init__weights=lab.home(spec).uri, **data)
    assert losses_of(lab, again) == pytest.approx([expected] * 2, rel=1e-6)
    monkeypatch.setattr(subprocess, "run", forked.run)  # the export is read back in a fork
    exported = keras.saving.load_model(Run(lab.home(again).uri).export(tmp_path / "out.keras"))
    assert exported.evaluate(*examples(), verbose=0) == pytest.approx(expected, rel=1e-6)


def test_statistics_of_a_resumed_run_are_the_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = lab_of(tmp_path, NORMALIZED)
    monkeypatch.chdir(lab.code)
    x, _ = examples()
    digests = []
    for name, grows in (("straight", False), ("cut", True)):
        spec = spec_of("build", run=name, model__options={"rate": 0.1, "adapt": True, "doubled": True})
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
    command = [sys.executable, "-P", "-m", "baton.flows.train", str(file), "--set", f"run={name}", *words]
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
    first = trained(file, "other", "--max-segments", "1", seed="1")
    # A notebook trains in a process of its own, with the run's seed.
    other = run(file, run="other")
    homes = [tmp_path / "runs" / name for name in ("other", "straight")]
    assert read_history(homes[0]) == read_history(homes[1])
    assert tip_of(homes[0]).state_digest == straight["state_digest"]
    default = trained(file, "default", "--max-segments", "1", seed=None)
    assert default["state_digest"] != first["state_digest"]
    home = tmp_path / "runs" / "default" / "log" / "00000000.json"
    assert json.loads(home.read_text())["body"]["environment"]["hash_seed"] == 0
    # Its own process has another order of the set, by which it cannot build the model.
    with pytest.raises(BatonError, match="table `table` of layer `index` changed: ") as refused:
        other.model()
    assert "hint: sets have another order in this process; start it with PYTHONHASHSEED=1" in str(refused.value)


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


def test_run_keeps_the_vocabulary_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import keras

    for name, text in OF_WORDS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    corpus = tmp_path / "corpus.txt"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", forked.run)  # the export is read back in a fork

    def train(*words: str) -> tuple[int, str]:
        command = [sys.executable, "-P", "-m", "baton.flows.train", "run.yaml", *words]
        done = forked.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        return done.returncode, done.stderr

    def here(*words: str) -> tuple[int, str]:
        return main([*words]), capsys.readouterr().err

    export = ("export", "run.yaml", "--format", "keras", "--to", "words.keras")
    assert train("--max-segments", "1")[0] == 3
    corpus.write_text(OF_WORDS["corpus.txt"] + "new blue\n" * 9, encoding="utf-8")
    for code, error in (train(), here(*export), here("evaluate", "run.yaml")):
        assert code == 2, error
        assert "vocabulary of layer `words` changed: it has 4 tokens instead of 3; token 2 was 'red', is 'blue'" in (
            " ".join(error.split())
        )
    with pytest.raises(BatonError, match="vocabulary of layer `words` changed"):
        run("run.yaml")
    assert not (tmp_path / "words.keras").exists()
    corpus.write_text(OF_WORDS["corpus.txt"], encoding="utf-8")
    assert train()[0] == here(*export)[0] == 0
    layer = keras.saving.load_model("words.keras").get_layer("words")
    assert layer.get_vocabulary() == ["", "[UNK]", "red", "green", "blue"]
