"""Replicas draw their own dropout masks, continue them after a restore, and start with the same weights.

Their metrics are taken in a graph, and are those that eager operations read.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.model.metrics import RowMetrics, read_results
from baton.tasks.foundation.state.warm_state import PROCESS_STATE
from baton.tasks.train_segment import trainer
from tests.support.lab import Lab, in_fresh_process, lab_of, spec_of

MODEL = """
class Masked(keras.layers.Layer):
    \"\"\"Keeps the dropout mask that it drew last.\"\"\"

    def __init__(self, **settings):
        super().__init__(**settings)
        self.drop = keras.layers.Dropout(0.5)

    def build(self, shape):
        self.mask = self.add_weight((24,), "zeros", trainable=False, name="mask")

    def call(self, x, training=False):
        if training:
            self.mask.assign(self.drop(ops.ones((24,)), training=True))
        return x


def build():
    x = keras.Input((6,))
    y = keras.layers.Dropout(0.2)(keras.layers.Dense(5)(Masked()(x)))
    model = keras.Model(x, keras.layers.Dense(3)(y))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model
"""
STEPS = 2


def masks_in(lab: Lab, spec: Any, ref: Any) -> list[list[float]]:
    tensors = lab.tensors(spec, ref)
    keys = sorted(key for key in tensors if "/mask/replica_" in key)
    return [np.frombuffer(tensors[key][2], np.float32).tolist() for key in keys]


def masks(folder: str, replicas: int) -> dict[str, Any]:
    """The masks of each step, each from a new trainer; and those of the last step without a cut.

    And the metrics of each step as eager operations read them, as they are taken in a graph, and once they are taken.
    """
    rows: list[Any] = []

    class Compared(RowMetrics):
        def take(self) -> dict[str, float]:
            given = self._model, self._strategy, self._returned
            eager = read_results(*given).numbers
            rows.append([eager, super().take(), self._function is not None, read_results(*given).numbers])
            return dict(rows[-1][1])

    lab = Lab(Path(folder), Path(folder) / "code")
    spec = spec_of("build", run=f"on-{replicas}", replicas=replicas, train__steps=STEPS, train__log_every_steps=1)
    start = lab.begin(spec).tip
    assert start is not None
    shared = {key: value[2].hex() for key, value in lab.tensors(spec, start).items() if "/replica_" not in key}
    cut, at = [], start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "RowMetrics", Compared)
        for step in range(1, STEPS + 1):
            PROCESS_STATE.forget()
            at = lab.train(spec, at, step).staged
            cut.append(masks_in(lab, spec, at))
        straight = lab.train(spec, start, STEPS).staged
        PROCESS_STATE.forget()
    return {"shared": shared, "cut": cut, "straight": masks_in(lab, spec, straight), "rows": rows}


@pytest.mark.slow
def test_replicas_draw_their_own_dropout_masks_and_share_metrics(tmp_path: Path) -> None:
    lab_of(tmp_path, MODEL)
    by_replicas = {1: masks(str(tmp_path), 1)}
    by_replicas[4] = in_fresh_process(masks, folder=str(tmp_path), replicas=4)
    for replicas, each in by_replicas.items():
        drawn = [tuple(mask) for step in each["cut"] for mask in step]
        assert {value for mask in drawn for value in mask} == {0.0, 2.0}
        # No mask of a replica and step repeats another; with 2**24 masks that is not chance.
        assert len(drawn) == len(set(drawn)) == replicas * STEPS
        assert each["straight"] == each["cut"][-1]
        # Replica 0 draws the masks of a single replica.
        assert [step[0] for step in each["cut"]] == [step[0] for step in by_replicas[1]["cut"]]
        # Weights, optimizer and seeds start equal on any number of replicas.
        assert each["shared"] == by_replicas[1]["shared"]
        assert any(key.startswith("model/dense/kernel") for key in each["shared"])
        assert len(each["rows"]) == 2 * STEPS
        for eager, taken, in_graph, after in each["rows"]:
            assert taken == eager
            assert taken["loss"] > 0
            assert in_graph
            assert set(after.values()) == {0.0}
