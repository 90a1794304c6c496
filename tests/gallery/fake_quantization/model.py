"""Training that is aware of quantization to 8 bits."""

import keras
import tensorflow as tf
from keras import layers, ops


class QuantizedDense(layers.Layer):
    """A dense layer with fake-quantized weights and outputs; the range of outputs is a moving average."""

    def __init__(self, units, activation=None, momentum=0.9, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.activation = keras.activations.get(activation)
        self.momentum = momentum

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[-1], self.units), name="kernel")
        self.bias = self.add_weight(shape=(self.units,), initializer="zeros", name="bias")
        self.low = self.add_weight(shape=(), initializer="zeros", trainable=False, name="low")
        self.high = self.add_weight(shape=(), initializer="ones", trainable=False, name="high")

    def call(self, x, training=False):
        kernel = tf.quantization.fake_quant_with_min_max_args(ops.convert_to_tensor(self.kernel), -2, 2)
        outputs = self.activation(ops.matmul(x, kernel) + self.bias)
        if training:
            low, high = ops.minimum(ops.min(outputs), 0.0), ops.max(outputs)
            self.low.assign(self.momentum * self.low + (1 - self.momentum) * low)
            self.high.assign(self.momentum * self.high + (1 - self.momentum) * high)
        return tf.quantization.fake_quant_with_min_max_vars(
            outputs, ops.convert_to_tensor(self.low), ops.convert_to_tensor(self.high)
        )


def build_model():
    model = keras.Sequential(
        [keras.Input((4,)), QuantizedDense(24, "relu"), QuantizedDense(24, "relu"), layers.Dense(2)]
    )
    model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="mean_squared_error", metrics=["mae"])
    return model
