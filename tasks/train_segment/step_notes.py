"""What a user should know about the traced train step."""

from collections.abc import Iterator

from tasks.foundation.messages import listed
from tasks.foundation.model.compile_settings import compile_words
from tasks.foundation.model.loss_scaling import summed_gradients_words
from tasks.foundation.model.metrics import read_results
from tasks.foundation.model.returned_metrics import MOST_VALUES
from tasks.foundation.state.train_state import TrainState
from tasks.foundation.telemetry.events import Note


def step_notes(state: TrainState, divided: int, *, reference: str, masked: bool) -> Iterator[Note]:
    """Yield notes about a train step that has just been traced.

    Args:
        state: whose model's step it is.
        divided: number of losses that Keras divided by the number of replicas while it was traced.
        reference: the function's name in the run file.
        masked: whether a Keras mask reaches the loss of micro-batches.
    """
    summed = summed_gradients_words(state.model, divided, reference=reference, replicas=state.accelerator.replicas)
    if summed and state.step == 0:  # once in a run
        yield Note(text=summed)
    for words in compile_words(state.model, state.accelerator):
        yield Note(text=f"{reference}: {words}")
    ignored = () if state.returned is None else state.returned.ignored
    if ignored:
        yield Note(
            text=f"{reference}: train_step returns {listed(ignored)}, which are not logged: each is no number, has "
            f"one for each example, or more than {MOST_VALUES}; return their means",
            warning=True,
        )
    for words in read_results(state.model, state.accelerator.strategy, state.returned).words():
        yield Note(text=f"{reference}: {words}")
    if masked:
        yield Note(
            text=f"{reference}: a Keras mask reaches the loss, which is then a mean over what the mask keeps of each "
            "micro-batch (train.accumulate), and not of the whole batch",
            warning=True,
        )
