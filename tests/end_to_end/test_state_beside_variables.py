"""What a model keeps beside its variables follows them, or is part of the run's identity."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flows.api import Run
from tasks.train_segment.stage import forget_trainer
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
    for run, grows in (("straight", False), ("cut", True)):
        spec = spec_of("build", run=run, model__options={"rate": 0.1, "adapt": True, "layer": layer})
        np.save("stats.npy", x)
        lab.relay(spec, 2, cold=True)
        if grows:
            np.save("stats.npy", 3 * x + 8)
            forget_trainer()
        head = lab.relay(spec, 5, cold=True)
        assert head.tip is not None
        digests.append(head.tip.state_digest)
    assert digests[0] == digests[1]
    assert lab.recorder.warnings == []
