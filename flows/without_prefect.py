"""The story without Prefect, for a process of its own: `python -m flows.without_prefect FILE [options]`.

The last line of standard output is the result as JSON. A `BatonError` is the last thing on standard error, as
`error: Class: text`, and ends the process with its exit code.
"""

from flows.process.leaving import leaves_with  # isort: skip - registers first what is to be called last

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tasks.foundation.accelerator.environment import quiet_tensorflow
from tasks.foundation.accelerator.tpu_environment import announce_tpu

quiet_tensorflow()
announce_tpu()

from flows.goal import Goal  # noqa: E402
from flows.process.standard_streams import outliving_readers  # noqa: E402
from flows.process.stop_signals import (  # noqa: E402
    RESUMABLE,
    Terminated,
    sender_words,
    sigterm_raises,
    stop_reason,
    unreachable_store,
)
from flows.relay import Stages, relay  # noqa: E402 - TensorFlow must be quiet before it is imported
from tasks.foundation.contracts.run_file import load_run_file  # noqa: E402
from tasks.foundation.errors import BatonError  # noqa: E402
from tasks.foundation.stops.hangup import terminal_closed  # noqa: E402
from tasks.foundation.telemetry.console import Console  # noqa: E402


def _plain(stage: str) -> Callable[..., Any]:
    """A stage, imported when it is called: what the log refuses is refused before TensorFlow is waited for."""

    def call(*given: Any, **named: Any) -> Any:
        return getattr(import_module(f"tasks.{stage}.stage"), stage)(*given, **named)

    return call


_BY_NAME: dict[str, Any] = {stage: _plain(stage) for stage in Stages.names()}
PLAIN = Stages(**_BY_NAME)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train one run file to its goal.

    Args:
        arguments: what follows the module's name; left out: the process's own.

    Returns:
        The exit code: 0, 3 if work is left to do, or that of the `BatonError` that ended the run.
    """
    parser = argparse.ArgumentParser(
        prog="python -m flows.without_prefect", description="Train a run file without Prefect."
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--until-step", type=int)
    parser.add_argument("--max-segments", type=int)
    parser.add_argument("--max-seconds", type=float)
    parser.add_argument("--try-again", action="store_true")
    parser.add_argument("--take-over", action="store_true")
    options = parser.parse_args(arguments)
    with outliving_readers():
        return _train(options)


def _train(options: argparse.Namespace) -> int:
    try:
        run = load_run_file(options.file, options.overrides)
        goal = Goal.of(
            run.spec,
            until_step=options.until_step,
            max_segments=options.max_segments,
            max_seconds=options.max_seconds,
        )
        with sigterm_raises(), Console(sys.stderr) as console:
            result = relay(
                run, goal, PLAIN, telemetry=console, try_again=options.try_again, take_over=options.take_over
            )
    except (Terminated, KeyboardInterrupt) as fault:
        away, reason = unreachable_store(fault), stop_reason(fault)
        by = f" by {sender_words()}" if reason == "sigterm" and terminal_closed() else ""
        sys.stderr.write(f"stopped: {reason}{by}\n" + (f"{away}\n" if away is not None else ""))
        return RESUMABLE
    except BatonError as fault:
        sys.stderr.write(f"error: {type(fault).__name__}: {fault}\n")
        return fault.exit_code
    sys.stdout.write(result.model_dump_json() + "\n")
    return RESUMABLE if result.stopped else 0


if __name__ == "__main__":
    sys.exit(leaves_with(main()))
