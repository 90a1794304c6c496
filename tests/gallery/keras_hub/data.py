"""Sentences as token ids of KerasHub's WordPiece tokenizer, and whether they praise."""

import keras_hub
import numpy as np

WORDS = ["fast", "slow", "good", "bad", "cheap", "dear", "late", "nice", "un", "##fair", "##ly"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
LENGTH = 8


def load(examples=160):
    tokenize = keras_hub.tokenizers.WordPieceTokenizer(vocabulary=VOCABULARY, sequence_length=LENGTH)
    draw = np.random.default_rng(17)
    for _ in range(examples):
        words = draw.choice([*WORDS[:8], "unfair", "fairly"], size=draw.integers(2, 7))
        yield np.array(tokenize(" ".join(words)), "int32"), int("good" in words or "nice" in words)
