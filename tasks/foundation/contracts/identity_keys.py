"""The keys of a run's identity: what another value would mean, and what an accepted change does."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recorded:
    """A key of the identity.

    Attributes:
        why: completes "a change would make it another run, with ...".
        accepted: effect of an accepted change.
    """

    why: str
    accepted: str


CALLBACKS = "train.callbacks"
VALIDATION = "data.validation"
MIXTURE = "data.sources"
SHUFFLE = "data.shuffle"
SIGNATURE = "model.signature"
CONTENTS = "model.contents"
TRANSFORM_CONTENTS = "data.contents"
TRANSFORMS = ("data.transform", "data.batch_transform", "data.validation_transform")

_CARRIED = (
    "applies from that step on: weights, and all that means the same, keep their values; other slots, metrics and "
    "seeds begin fresh"
)
_OTHER_BATCHES = "changes the data order from that step on: examples of the current epoch may repeat or be left out"

IDENTITY: Mapping[str, Recorded] = {
    "data.content_digest": Recorded("other examples", _OTHER_BATCHES),
    MIXTURE: Recorded("another mixture of the examples", _OTHER_BATCHES),
    VALIDATION: Recorded(
        "another validation set, so that early stopping, keep-best and the curves would compare two sets",
        "applies from that step on; the best checkpoint is chosen anew, on the new set",
    ),
    SHUFFLE: Recorded("another order of the examples", _OTHER_BATCHES),
    "data.window_shards": Recorded("another order of the examples", _OTHER_BATCHES),
    "data.transform": Recorded("another transform of the training examples", "applies from that step on"),
    "data.batch_transform": Recorded("another transform of the training batches", "applies from that step on"),
    "data.validation_transform": Recorded(
        "another transform of the validation examples", "applies to evaluations from that step on"
    ),
    TRANSFORM_CONTENTS: Recorded(
        "other vocabularies, tables or arrays that transforms read", "applies from that step on"
    ),
    "train.seed": Recorded(
        "other initial weights, order and dropout",
        "another order, and other draws without a generator, from that step on; weights and generators are the "
        "checkpoint's",
    ),
    "train.global_batch_size": Recorded("other batches", _OTHER_BATCHES),
    "train.drop_remainder": Recorded("other batches from the second epoch on", _OTHER_BATCHES),
    "train.accumulate": Recorded("gradients summed in another order", "applies from that step on"),
    "train.precision": Recorded("another arithmetic", _CARRIED),
    "train.class_weight": Recorded("another loss", "applies from that step on"),
    CALLBACKS: Recorded(
        "other callbacks, or other steps at which they act",
        "applies from that step on; the callbacks start with fresh state, and a run that they had stopped continues",
    ),
    "init.weights": Recorded("other initial weights", "has no effect: the weights come from the checkpoint"),
    "init.freeze": Recorded("other trainable variables", _CARRIED),
    "model.config": Recorded("another architecture", _CARRIED),
    "model.code": Recorded("other code in the user's layers or train_step", _CARRIED),
    SIGNATURE: Recorded(
        "other variables",
        "is accepted with any other key; weights with other names or shapes never are: init.weights in a new run",
    ),
    "model.options": Recorded("other arguments of the function that builds the model", _CARRIED),
    CONTENTS: Recorded(
        "other vocabularies, tables or arrays in the layers, or that their code reads", "applies from that step on"
    ),
    "compile.optimizer": Recorded(
        "another optimizer or learning rate", f"{_CARRIED}; a changed learning rate replaces the checkpoint's"
    ),
    "compile.loss": Recorded("another loss", "applies from that step on"),
    "compile.metrics": Recorded("other metrics, whose sums are part of the state", _CARRIED),
    "compile.other": Recorded("another way to compute gradients or metrics", _CARRIED),
}
