"""BERT of KerasHub with random weights: low-rank adapters train on a backbone of int8."""

import keras
import keras_hub

from .data import LENGTH, VOCABULARY


def build_model(rank=2):
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=len(VOCABULARY),
        num_layers=1,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        max_sequence_length=LENGTH + 2,
    )
    backbone.quantize("int8")
    backbone.enable_lora(rank)
    model = keras_hub.models.BertTextClassifier(backbone, num_classes=2, dropout=0.1)
    model.compile(
        optimizer=keras.optimizers.AdamW(1e-2),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model
