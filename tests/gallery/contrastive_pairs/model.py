"""A siamese network with a contrastive loss."""

import keras
from keras import layers, ops


def euclidean_distance(vectors):
    x, y = vectors
    squares = ops.sum(ops.square(x - y), axis=1, keepdims=True)
    return ops.sqrt(ops.maximum(squares, keras.config.epsilon()))


def contrastive_loss(margin=1.0):
    def loss(y_true, y_pred):
        near = ops.square(y_pred)
        far = ops.square(ops.maximum(margin - y_pred, 0))
        return ops.mean(y_true * near + (1 - y_true) * far)

    return loss


def build_model():
    stroke = keras.Input((12,))
    x = layers.BatchNormalization()(stroke)
    x = layers.Dense(16, activation="tanh")(x)
    embedding = keras.Model(stroke, layers.Dense(4)(x), name="embedding")

    left, right = keras.Input((12,), name="left"), keras.Input((12,), name="right")
    distance = layers.Lambda(euclidean_distance, output_shape=(1,))([embedding(left), embedding(right)])
    model = keras.Model({"left": left, "right": right}, distance)
    model.compile(loss=contrastive_loss(), optimizer="rmsprop", metrics=["mae"])
    return model
