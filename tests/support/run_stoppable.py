"""Train a run file without Prefect and handle signals as `baton run` does.

`python run_stoppable.py FILE [options]` exits with 3 if work is left. The last line of standard output is the result as
JSON, with the last step that was trained in memory as `reached`.
"""

import argparse
import json
import sys
from pathlib import Path

from baton.flows.process import sigterm_raises, stop_reason
from baton.tasks.foundation.machine.stops import Terminated
from baton.tasks.foundation.telemetry.events import Event, Training

RESUMABLE = 3


class Reached:
    """A sink that keeps the last step that was trained."""

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
    parser.add_argument("--take-over", action="store_true", help="start even if another process trains the run")
    parser.add_argument("--report", action="store_true", help="write the report too")
    options = parser.parse_args(arguments)
    reached, result = Reached(), {"exit_reason": "sigterm"}
    try:
        with sigterm_raises():
            result = trained(options, reached)
    except Terminated as fault:
        result = {"exit_reason": stop_reason(fault)}
    sys.stdout.write(json.dumps({**result, "reached": reached.step}) + "\n")
    return 0 if result["exit_reason"] in {"complete", "nothing_to_do"} else RESUMABLE


def trained(options: argparse.Namespace, reached: Reached) -> dict[str, str]:
    # Imported here so that signals during the import of TensorFlow are handled too.
    from baton.flows import result
    from baton.flows.opened_run import OpenedRun
    from baton.flows.result import Goal
    from baton.flows.train import train
    from baton.tasks.foundation.contracts.run_file import load_run_file
    from baton.tasks.foundation.telemetry.console import Console
    from baton.tasks.foundation.telemetry.events import Several
    from tests.support.save_marks import mark_saves

    mark_saves()
    if not options.report:
        result.write_report = lambda _home, **_title: None
    run = load_run_file(options.file, options.overrides)
    goal = Goal.of(run.spec, until_step=None, max_segments=options.max_segments)
    with Console(sys.stderr) as console:
        telemetry = Several((console, reached))
        done = train(OpenedRun.open(run), goal, telemetry=telemetry, take_over=options.take_over)
        return dict(done.model_dump(mode="json"))


if __name__ == "__main__":
    from baton.tasks.foundation.errors import BatonError

    try:
        sys.exit(main(sys.argv[1:]))
    except BatonError as fault:
        sys.stderr.write(f"error: {type(fault).__name__}: {fault}\n")
        sys.exit(fault.exit_code)
