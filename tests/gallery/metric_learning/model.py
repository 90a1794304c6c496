"""Learns an embedding in which the anchor and the positive of a class are close."""

import keras
import tensorflow as tf
from keras import layers, ops


class EmbeddingModel(keras.Model):
    def train_step(self, data):
        if isinstance(data, tuple):
            data = data[0]
        anchors, positives = data[:, 0], data[:, 1]
        classes = anchors.shape[1]
        with tf.GradientTape() as tape:
            anchor_embeddings = self(anchors, training=True)
            positive_embeddings = self(positives, training=True)
            similarities = ops.einsum("bae,bpe->bap", anchor_embeddings, positive_embeddings) / 0.2
            labels = ops.tile(ops.arange(classes)[None], (ops.shape(anchors)[0], 1))
            loss = self.compute_loss(y=labels, y_pred=similarities)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(labels, similarities)
        return {metric.name: metric.result() for metric in self.metrics}


def build_model():
    x = keras.Input((6, 8))
    hidden = layers.Dense(16, activation="relu")(x)
    embedding = layers.UnitNormalization()(layers.Dense(4)(hidden))
    model = EmbeddingModel(x, embedding)
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
    return model
