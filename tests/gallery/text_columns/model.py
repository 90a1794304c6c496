"""A wide part over looked-up strings, and a deep one over the words of a text."""

import keras
from keras import layers

from .data import COLOURS, SHOPS, WORDS


def build_model():
    inputs = {
        "shop": keras.Input((), name="shop", dtype="string"),
        "colour": keras.Input((), name="colour", dtype="string"),
        "review": keras.Input((), name="review", dtype="string"),
        "price": keras.Input((), name="price"),
    }
    colour = layers.StringLookup(vocabulary=COLOURS, output_mode="one_hot")(inputs["colour"])
    shop = layers.StringLookup(vocabulary=SHOPS)(inputs["shop"])
    words = layers.TextVectorization(vocabulary=WORDS, output_sequence_length=6)(inputs["review"])

    shop = layers.Embedding(len(SHOPS) + 1, 4)(shop)
    words = layers.GlobalAveragePooling1D()(layers.Embedding(len(WORDS) + 2, 8)(words))
    price = layers.Reshape((1,))(inputs["price"])
    deep = layers.Dense(8, activation="relu")(layers.Concatenate()([shop, words, price]))
    deep = layers.Dropout(0.1)(deep)

    output = layers.Dense(1, activation="sigmoid")(layers.Concatenate()([colour, deep]))
    model = keras.Model(inputs, output)
    model.compile(optimizer="rmsprop", loss="binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")])
    return model
