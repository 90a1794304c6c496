"""Train without Prefect and without one promise: `promises.py PROMISE RUN_FILE`; PROMISE is one of these.

all        none is left out
kernels    the run file has `train.deterministic: false`
sums       sums of more than two values are added in any order
loss       the loop does not look whether each step's loss is finite, and keeps no loss of each replica
waiting    the loop does not measure how long it waits for batches
none       all four
"""

import sys
from typing import Any

from baton.flows.train import main

import tensorflow as tf  # isort: skip - quiet since the import above

from baton.tasks.foundation.model.keras_steps import not_converted
from baton.tasks.train_segment import trainer


def leave_out_sums() -> None:
    """Leave the order of sums to TensorFlow."""
    trainer.fix_sum_order = lambda *_given: ()


def leave_out_loss() -> None:
    """Look at no loss."""
    train = trainer.run_train_step

    def blind(*given: Any) -> tuple[None, None]:
        train(*given)
        return None, None

    trainer.run_train_step = not_converted(blind)  # type: ignore[assignment]


def leave_out_waiting() -> None:
    """Measure no wait for batches."""
    trainer._next_batch = not_converted(lambda iterator, *_given: (next(iterator), tf.constant(0.0, tf.float64)))


_LEAVE_OUT = {"sums": leave_out_sums, "loss": leave_out_loss, "waiting": leave_out_waiting}


if __name__ == "__main__":
    for name, leave_out in _LEAVE_OUT.items():
        if sys.argv[1] in {name, "none"}:
            leave_out()
    sys.exit(main(sys.argv[2:]))
