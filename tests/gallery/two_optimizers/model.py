"""One optimizer for embeddings, another for the dense layers."""

import keras
import tensorflow as tf
from keras import layers, ops


class Recommender(keras.Model):
    def __init__(self, users, items, width=6):
        super().__init__()
        self.user_embedding = layers.Embedding(users, width)
        self.item_embedding = layers.Embedding(items, width)
        self.tower = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(1)])

    def build(self, input_shape):
        width = self.user_embedding.output_dim + self.item_embedding.output_dim
        self.user_embedding.build(None)
        self.item_embedding.build(None)
        self.tower.build((None, width))
        self.built = True

    def compile(self, embedding_optimizer, tower_optimizer, **kwargs):
        super().compile(optimizer=tower_optimizer, **kwargs)
        self.embedding_optimizer = embedding_optimizer

    def call(self, pairs):
        users, items = self.user_embedding(pairs[:, 0]), self.item_embedding(pairs[:, 1])
        return self.tower(ops.concatenate([users, items], axis=1)) + ops.sum(users * items, axis=1, keepdims=True)

    def train_step(self, data):
        pairs, ratings = data
        embeddings = self.user_embedding.trainable_variables + self.item_embedding.trainable_variables
        with tf.GradientTape() as tape:
            predictions = self(pairs, training=True)
            loss = self.compute_loss(x=pairs, y=ratings, y_pred=predictions)
        of_embeddings, of_tower = tape.gradient(loss, (embeddings, self.tower.trainable_variables))
        self.embedding_optimizer.apply(of_embeddings, embeddings)
        self.optimizer.apply(of_tower, self.tower.trainable_variables)
        return {**self.compute_metrics(pairs, ratings, predictions), "loss": loss}


def build_model(users=20, items=15):
    model = Recommender(users, items)
    model.build((None, 2))
    embedding_optimizer, tower_optimizer = keras.optimizers.Adagrad(0.1), keras.optimizers.Adam(0.01)
    embedding_optimizer.build(model.user_embedding.trainable_variables + model.item_embedding.trainable_variables)
    tower_optimizer.build(model.tower.trainable_variables)
    model.compile(embedding_optimizer, tower_optimizer, loss="mse", metrics=["mae"])
    return model
