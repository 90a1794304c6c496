"""Run a run file through the real stages without Prefect: `python run_plainly.py FILE [options]`, see `flows.plain`.

One option more: `--without-seed-state` leaves the seeds out of the state tree, to see that the tests notice.
"""

import sys

from flows.commands.leaving import leaves_with
from flows.plain import main
from tasks.foundation.model import stepping
from tasks.foundation.state import train_state

_BROKEN = "--without-seed-state"


def leave_out_seed_state() -> None:
    """Break the state tree on purpose."""
    complete = train_state.leaves_of
    train_state.leaves_of = lambda model: tuple(leaf for leaf in complete(model) if not leaf.seed)
    stepping.uncovered = lambda _function, _leaves: ()


if __name__ == "__main__":
    if _BROKEN in sys.argv:
        leave_out_seed_state()
    sys.exit(leaves_with(main([word for word in sys.argv[1:] if word != _BROKEN])))
