"""A run file through the real stages without Prefect, answering signals as `baton run` does.

`python run_stoppable.py FILE [options]`: exits 3 where work is left. The last line of standard output tells how far the
training in memory had come, and what the log says.
"""

import argparse
import json
import sys
from pathlib import Path

from flows.process.stop_signals import Terminated, sigterm_raises, stop_reason
from tasks.foundation.telemetry.events import Event, Training

RESUMABLE = 3


class Reached:
    """A sink that keeps the last step that was trained in memory."""

    def __init__(self) -> None:
        self.step: int | None = None

    def emit(self, event: Event) -> None:
        if isinstance(event, Training):
            self.step = event.step


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--max-segments", type=int)
    parser.add_argument("--report", action="store_true", help="write the report too, which takes its time")
    options = parser.parse_args(arguments)
    reached, told = Reached(), {"exit_reason": "sigterm"}
    try:
        with sigterm_raises():
            told = trained(options, reached)
    except Terminated as fault:
        told = {"exit_reason": stop_reason(fault)}
    sys.stdout.write(json.dumps({**told, "reached": reached.step}) + "\n")
    return 0 if told["exit_reason"] in {"complete", "nothing_to_do"} else RESUMABLE


def trained(options: argparse.Namespace, reached: Reached) -> dict[str, str]:
    # Imported here: a signal that comes while TensorFlow is being imported is answered too.
    from flows import goal as goals
    from flows.goal import Goal
    from flows.relay import relay
    from flows.without_prefect import PLAIN
    from tasks.foundation.contracts.run_file import load_run_file
    from tasks.foundation.telemetry.console import Console
    from tasks.foundation.telemetry.events import Several

    if not options.report:
        goals.write_report = lambda _home, **_title: None
    run = load_run_file(options.file, options.overrides)
    goal = Goal.of(run.spec, until_step=None, max_segments=options.max_segments)
    with Console(sys.stderr) as console:
        return dict(relay(run, goal, PLAIN, telemetry=Several((console, reached))).model_dump(mode="json"))


if __name__ == "__main__":
    from tasks.foundation.errors import BatonError

    try:
        sys.exit(main(sys.argv[1:]))
    except BatonError as fault:
        sys.stderr.write(f"error: {type(fault).__name__}: {fault}\n")
        sys.exit(fault.exit_code)
