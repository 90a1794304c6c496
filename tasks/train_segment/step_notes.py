"""What a user should know about the traced train step."""

from collections.abc import Iterator

from tasks.foundation.messages import listed
from tasks.foundation.model.compile_settings import compile_words
from tasks.foundation.model.loss_scaling import ScaledLosses, summed_gradients_words
from tasks.foundation.state.train_state import TrainState
from tasks.foundation.telemetry.events import Note


def step_notes(state: TrainState, scaled: ScaledLosses, *, reference: str, masked: bool) -> Iterator[Note]:
    """Yield notes about a train step that has just been traced.

    Args:
        state: whose model's step it is.
        scaled: the losses that Keras scaled while it was traced.
        reference: the function's name in the run file.
        masked: whether a Keras mask reaches the loss of micro-batches.
    """
    summed = summed_gradients_words(state.model, scaled, reference=reference, replicas=state.accelerator.replicas)
    if summed and state.step == 0:  # once in a run
        yield Note(text=summed)
    for words in compile_words(state.model, state.accelerator):
        yield Note(text=f"{reference}: {words}")
    ignored = () if state.returned is None else state.returned.ignored
    if ignored:
        yield Note(
            text=f"{reference}: train_step returns {listed(ignored)}, which are no scalars and are not logged; "
            "return their means",
            warning=True,
        )
    if masked:
        yield Note(
            text=f"{reference}: a Keras mask reaches the loss, which is then a mean over what the mask keeps of each "
            "micro-batch (train.accumulate), and not of the whole batch",
            warning=True,
        )
