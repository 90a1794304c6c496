"""Train a run file without Prefect: `python run_without_prefect.py FILE [options]`; see `baton.flows.train`.

Two more options: `--without-seed-state` leaves the seeds out of the state tree, so that a test can show that it
notices. `--report` writes the report, which takes a tenth of such a short process. With BATON_TEST_BATCH_SECONDS in the
environment, each training batch of this host comes so much later.
"""

import os
import sys
import time
from typing import Any

import tensorflow as tf

from baton.flows import result
from baton.flows.process import exits_with
from baton.flows.train import main
from baton.tasks.foundation.model import step
from baton.tasks.foundation.state import train_state
from baton.tasks.train_segment import trainer

_BROKEN, _REPORT = "--without-seed-state", "--report"
_BATCH_SECONDS = "BATON_TEST_BATCH_SECONDS"


def leave_out_seed_state() -> None:
    """Leave the seeds out of the state tree."""
    complete = train_state.leaves_of
    train_state.leaves_of = lambda *given: tuple(leaf for leaf in complete(*given) if not leaf.seed)
    step.untracked_variables = lambda _function, _leaves: ()


def leave_out_report() -> None:
    """Do not write the report."""
    result.write_report = lambda _home, **_title: None


def delay_batches(seconds: float) -> None:
    """Let each training batch come later."""
    original = trainer.training_dataset

    def wait(value: Any) -> Any:
        time.sleep(seconds)
        return value

    def delayed(*batch: Any) -> Any:
        first, *others = tf.nest.flatten(batch)
        waited = tf.ensure_shape(tf.numpy_function(wait, [first], first.dtype), first.shape)
        return tf.nest.pack_sequence_as(batch, [waited, *others])

    trainer.training_dataset = lambda *given, **named: original(*given, **named).map(delayed)


if __name__ == "__main__":
    if _REPORT not in sys.argv:
        leave_out_report()
    if _BATCH_SECONDS in os.environ:
        delay_batches(float(os.environ[_BATCH_SECONDS]))
    if _BROKEN in sys.argv:
        leave_out_seed_state()
    if "BATON_TEST_HOLD" in os.environ:
        from tests.support.moments import hold_where_asked

        hold_where_asked()
    sys.exit(exits_with(main([word for word in sys.argv[1:] if word not in {_BROKEN, _REPORT}])))
