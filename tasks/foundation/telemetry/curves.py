"""What the curves of a run show of one commit."""

from collections.abc import Iterator

from tasks.foundation.contracts.log_entry import Commit, Entry


def training_curves(entry: Entry, body: Commit) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield step and values by name: metrics, learning rate, epochs that are done, and at its end the commit's speed.

    Args:
        entry: the entry of the commit.
        body: the commit.
    """
    epoch = None if entry.totals is None else entry.totals.epoch
    for row in body.history:
        yield (
            row.step,
            {
                **row.metrics,
                **({} if row.learning_rate is None else {"learning_rate": row.learning_rate}),
                **({} if epoch is None else {"epoch": epoch.after(row.step)}),
            },
        )
    seconds = body.seconds.get("train", 0.0)
    if body.history and body.examples and seconds > 0:
        yield body.checkpoint.step, {"examples_per_second": body.examples / seconds}
