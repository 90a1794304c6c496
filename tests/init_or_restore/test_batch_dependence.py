"""Finds exactly the parts of a model that depend on the number of replicas."""

from collections.abc import Callable
from typing import Any

import keras
import pytest

from baton.tasks.init_or_restore.model_requirements import Dependence, batch_dependent_parts, describe_dependence

BATCH = "statistics of one replica's examples; synchronized=True uses those of all replicas"
RANDOM = "random, each replica draws its own values"
L = keras.layers


class Block(keras.layers.Layer):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.inner = {"norm": L.BatchNormalization(name="norm")}
        self.drops = [L.Dropout(0.1, name="drop")]

    def call(self, x: Any) -> Any:
        return self.drops[0](self.inner["norm"](x))


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__(name="mine")
        self.block = Block(name="block")
        self.out = L.Dense(3)

    def call(self, x: Any) -> Any:
        return self.out(self.block(x))


def compiled(*layers: Any, shape: tuple[int, ...] = (4,), **settings: Any) -> Any:
    model = keras.Sequential([keras.Input(shape), *layers])
    model.compile(**{"optimizer": "sgd", "loss": "mse", **settings})
    return model


@pytest.mark.parametrize(
    ("layers", "parts"),
    [
        (lambda: [L.Dense(3)], []),
        (lambda: [L.BatchNormalization(name="norm")], [("/norm", BATCH)]),
        (lambda: [L.BatchNormalization(synchronized=True)], []),
        (lambda: [L.BatchNormalization(trainable=False)], []),
        (lambda: [L.LayerNormalization(), L.GroupNormalization(2)], []),
        (
            lambda: [L.Dropout(0.1, name="drop"), L.GaussianNoise(0.1, name="noise")],
            [("drop", RANDOM), ("noise", RANDOM)],
        ),
        (lambda: [L.Dropout(0.0), L.GaussianNoise(0.0)], []),
        (lambda: [keras.Sequential([L.BatchNormalization(name="norm")], name="inside")], [("inside/norm", BATCH)]),
    ],
)
def test_batch_dependent_layers_are_found(layers: Callable[[], list[Any]], parts: list[tuple[str, str]]) -> None:
    found = batch_dependent_parts(compiled(*layers()))
    assert len(found) == len(parts)
    for dependence, (part, why) in zip(found, parts, strict=True):
        assert dependence.part.endswith(part)
        assert dependence.why == why


@pytest.mark.parametrize("rates", [{}, {"dropout": 0.2}, {"recurrent_dropout": 0.2}])
def test_recurrent_cells_are_random_only_with_a_rate(rates: dict[str, float]) -> None:
    found = batch_dependent_parts(compiled(L.LSTM(2, **rates), shape=(3, 2)))
    assert len(found) == len(rates)


def test_layers_in_dicts_and_lists_are_found() -> None:
    model = Subclassed()
    model.compile("sgd", "mse")
    model(keras.ops.zeros((2, 4)))
    drop, norm = sorted(batch_dependent_parts(model), key=lambda each: each.why)
    assert norm.part.endswith("norm")
    assert (norm.why, drop) == (BATCH, Dependence(part="drop", why=RANDOM))


def test_attention_with_dropout_is_random() -> None:
    x = keras.Input((5, 4))
    for rate, count in ((0.0, 0), (0.3, 1)):
        model = keras.Model(x, L.MultiHeadAttention(2, 2, dropout=rate)(x, x))
        model.compile("sgd", "mse")
        assert len(batch_dependent_parts(model)) >= count
        assert bool(batch_dependent_parts(model)) == bool(count)


@pytest.mark.parametrize("clipping", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_clipping_depends_on_replicas(clipping: str) -> None:
    (found,) = batch_dependent_parts(
        compiled(L.Dense(3), optimizer=keras.optimizers.Adam(name="adam", **{clipping: 0.5}))
    )
    assert found.part == f"{clipping} = 0.5 of optimizer adam"
    assert found.why == "clips each replica's gradients before they are summed"


def test_weighted_mean_loss_depends_on_replicas() -> None:
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight", name="weighed")
    (found,) = batch_dependent_parts(compiled(L.Dense(3), loss=loss))
    assert found == Dependence(part="loss weighed", why="a mean over the weights of one replica's examples")
    assert batch_dependent_parts(compiled(L.Dense(3), loss=keras.losses.MeanSquaredError())) == ()


def test_description_abridges_long_lists() -> None:
    assert "to float tolerance" in describe_dependence(())
    parts = [Dependence(part=f"layer_{index}", why="random") for index in range(6)]
    words = describe_dependence([*parts, Dependence(part="norm", why="statistics")])
    assert "by more than rounding" in words
    assert words.endswith("layer_0, layer_1, layer_2, layer_3 and 2 more (random); norm (statistics)")
