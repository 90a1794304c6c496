"""The inputs of BERT from token ids: start and end tokens, and a padding mask."""

import keras_hub
import tensorflow as tf

from .data import LENGTH, VOCABULARY

pack = keras_hub.layers.StartEndPacker(
    sequence_length=LENGTH + 2,
    start_value=VOCABULARY.index("[CLS]"),
    end_value=VOCABULARY.index("[SEP]"),
    pad_value=0,
)


def inputs(example):
    tokens, label = example
    tokens = pack(tf.boolean_mask(tokens, tokens > 0))
    return {"token_ids": tokens, "segment_ids": tf.zeros_like(tokens), "padding_mask": tokens > 0}, label
