"""Run a run file through the real stages without Prefect: `python run_plainly.py FILE [options]`.

The last line of standard output is the result as JSON; a `BatonError` ends it with its exit code.
"""

import argparse
import sys
from pathlib import Path

from tasks.foundation.accelerator.environment import quiet_tensorflow

quiet_tensorflow()

from flows.relay import Goal, Stages, relay  # noqa: E402 - TensorFlow must be quiet before it is imported
from tasks.checkpoint_to_gcs.stage import checkpoint_to_gcs  # noqa: E402
from tasks.evaluate.stage import evaluate  # noqa: E402
from tasks.foundation.contracts.run_file import load_run_file  # noqa: E402
from tasks.foundation.errors import BatonError  # noqa: E402
from tasks.foundation.model import stepping  # noqa: E402
from tasks.foundation.state import train_state  # noqa: E402
from tasks.foundation.telemetry.console import Console  # noqa: E402
from tasks.init_or_restore.stage import init_or_restore  # noqa: E402
from tasks.prepare_data.stage import prepare_data  # noqa: E402
from tasks.train_segment.stage import train_segment  # noqa: E402

PLAIN = Stages(
    prepare_data=prepare_data,
    init_or_restore=init_or_restore,
    train_segment=train_segment,
    checkpoint_to_gcs=checkpoint_to_gcs,
    evaluate=evaluate,
)


def leave_out_seed_state() -> None:
    """Break the state tree on purpose."""
    complete = train_state.leaves_of
    train_state.leaves_of = lambda model: tuple(leaf for leaf in complete(model) if not leaf.seed)
    stepping.uncovered = lambda _function, _leaves: ()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--until-step", type=int)
    parser.add_argument("--max-segments", type=int)
    parser.add_argument("--without-seed-state", action="store_true", help="to see that the tests notice")
    options = parser.parse_args()
    if options.without_seed_state:
        leave_out_seed_state()
    try:
        run = load_run_file(options.file, options.overrides)
        goal = Goal.of(run.spec, until_step=options.until_step, max_segments=options.max_segments)
        with Console(sys.stderr) as console:
            result = relay(run, goal, PLAIN, telemetry=console)
    except BatonError as fault:
        sys.stderr.write(f"error: {type(fault).__name__}: {fault}\n")
        return fault.exit_code
    sys.stdout.write(result.model_dump_json() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
