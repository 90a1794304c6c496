"""Train a run file without Prefect: `python run_without_prefect.py FILE [options]`; see `flows.without_prefect`.

Two options more: `--without-seed-state` leaves the seeds out of the state tree, to see that the tests notice, and
`--report` writes the report, whose pictures would otherwise be a tenth of such a short process.
"""

import sys

from flows import goal
from flows.process.leaving import leaves_with
from flows.without_prefect import main
from tasks.foundation.model import train_step
from tasks.foundation.state import train_state

_BROKEN, _REPORT = "--without-seed-state", "--report"


def leave_out_seed_state() -> None:
    """Break the state tree on purpose."""
    complete = train_state.leaves_of
    train_state.leaves_of = lambda *given: tuple(leaf for leaf in complete(*given) if not leaf.seed)
    train_step.uncovered = lambda _function, _leaves: ()


def leave_out_report() -> None:
    """For processes that nobody looks at."""
    goal.write_report = lambda _home, **_title: None


if __name__ == "__main__":
    if _REPORT not in sys.argv:
        leave_out_report()
    if _BROKEN in sys.argv:
        leave_out_seed_state()
    sys.exit(leaves_with(main([word for word in sys.argv[1:] if word not in {_BROKEN, _REPORT}])))
