"""One small model of each kind."""

from typing import Any

import keras

from . import layers


def _compiled(model: keras.Model, optimizer: Any = "adam", metrics: Any = ("accuracy",), **settings: Any) -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=list(metrics), **settings)
    return model


def _dense(*first: Any) -> keras.Model:
    x = keras.Input((6,))
    y = x
    for layer in (*first, keras.layers.Dense(5, activation="relu")):
        y = layer(y)
    return keras.Model(x, keras.layers.Dense(3)(y))


def functional() -> Any:
    return _compiled(_dense(keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)))


def plain(width: int = 5, rate: float = 0.1, loss: str = "sparse_categorical_crossentropy") -> Any:
    x = keras.Input((6,))
    y = keras.layers.Dense(3, activation="softmax")(keras.layers.Dense(width, activation="tanh")(x))
    model = keras.Model(x, y)
    model.compile(keras.optimizers.SGD(rate), loss=loss, metrics=["accuracy"])
    return model


def subclassed() -> Any:
    return _compiled(layers.Subclassed())


def own_tracker() -> Any:
    model = layers.OwnTracker()
    model.compile("adam")
    return model


def own_step_compiled() -> Any:
    return _compiled(layers.OwnStepCompiled())


def own_loss() -> Any:
    return _compiled(layers.OwnLoss())


def schedule() -> Any:
    rate = keras.optimizers.schedules.CosineDecay(0.1, 12)
    return _compiled(_dense(), keras.optimizers.SGD(rate, momentum=0.9))


def averaged() -> Any:
    return _compiled(_dense(), keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.8))


def weighted() -> Any:
    return _compiled(_dense(), weighted_metrics=[keras.metrics.SparseCategoricalAccuracy(name="weighted")])


def several() -> Any:
    left, right = keras.Input((4,), name="left"), keras.Input((2,), name="right")
    both = keras.layers.Concatenate()([keras.layers.Dense(4)(left), keras.layers.Dense(4)(right)])
    outputs = {"kind": keras.layers.Dense(3, name="kind")(both), "size": keras.layers.Dense(1, name="size")(both)}
    model = keras.Model({"left": left, "right": right}, outputs)
    model.compile(
        "adam",
        loss={"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"},
        loss_weights={"kind": 1.0, "size": 0.5},
        metrics={"kind": ["accuracy"], "size": ["mae"]},
    )
    return model


def accumulating() -> Any:
    return _compiled(_dense(), keras.optimizers.Adam(0.05, gradient_accumulation_steps=3))


def overwriting() -> Any:
    return _compiled(_dense(), keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=4))


def mixed() -> Any:
    keras.mixed_precision.set_global_policy("mixed_float16")
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.02, use_ema=True), dynamic_growth_steps=4)
    return _compiled(_dense(keras.layers.Dropout(0.2)), scaled)


def bfloat() -> Any:
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    return _compiled(_dense(keras.layers.Dropout(0.2)))


def nadam() -> Any:
    return _compiled(_dense(), keras.optimizers.Nadam(0.02))


def adafactor() -> Any:
    return _compiled(_dense(), keras.optimizers.Adafactor(0.02))


def raw_variable() -> Any:
    return _compiled(_dense(layers.RawVariable()))


def tf_generator() -> Any:
    return _compiled(_dense(layers.GeneratorNoise()))


def own_seed() -> Any:
    return _compiled(_dense(layers.SeededNoise()))


def attention() -> Any:
    x = keras.Input((5, 4))
    y = keras.layers.MultiHeadAttention(2, 2, dropout=0.3)(x, x)
    return _compiled(
        keras.Model(x, keras.layers.Dense(3)(keras.layers.Flatten()(keras.layers.LayerNormalization()(y))))
    )


def counting() -> Any:
    return _compiled(_dense(), metrics=[layers.CountRight()])


def combined() -> Any:
    """Several inputs and outputs, and most of what the models above keep beside their weights."""
    left, right = keras.Input((4,), name="left"), keras.Input((2,), name="right")
    y = keras.layers.Concatenate()([left, right])
    for layer in (layers.RawVariable(), layers.GeneratorNoise(), layers.SeededNoise()):
        y = layer(y)
    y = keras.layers.Dropout(0.3)(keras.layers.BatchNormalization()(y))
    y = keras.layers.Reshape((3, 2))(y)
    y = keras.layers.Flatten()(keras.layers.MultiHeadAttention(2, 2, dropout=0.3)(y, y))
    outputs = {"kind": keras.layers.Dense(3, name="kind")(y), "size": keras.layers.Dense(1, name="size")(y)}
    model = keras.Model({"left": left, "right": right}, outputs)
    averages = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 4}
    model.compile(
        keras.optimizers.Adam(0.05, gradient_accumulation_steps=3, **averages),
        loss={"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"},
        metrics={"kind": ["accuracy", layers.CountRight()], "size": ["mae"]},
    )
    return model


def adversaries() -> Any:
    model = layers.Adversaries()
    maker, judge = keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.01)
    maker.build(model.maker.trainable_variables)
    judge.build(model.judge.trainable_variables)
    model.compile(maker, judge)
    return model
