"""`baton profile`: traces the next steps of the process at work, for TensorBoard's profiler."""

import sys
from datetime import UTC, datetime
from typing import Annotated

import typer

from baton.flows.commands.options import RUN_FILE, Address, AsJson, Overrides
from baton.flows.commands.output import Output, say, say_json
from baton.flows.facts import RunStatus
from baton.flows.opened_run import open_run
from baton.tasks.foundation.errors import InvalidInput
from baton.tasks.foundation.log.attempts import is_alive
from baton.tasks.foundation.telemetry.profiling import MOST_STEPS, ask_for_trace
from baton.tasks.foundation.text import counted


def profile(
    address: Address = RUN_FILE,
    overrides: Overrides = None,
    *,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, max=MOST_STEPS, help="trace N steps")] = 20,
    as_json: AsJson = False,
) -> None:
    """Trace the next steps of the process at work, for TensorBoard.

    The process goes on, and its results do not change. It looks for requests at its heartbeats: each second at first,
    every 30 seconds after an hour. The trace is written into the run's home.
    """
    opened = open_run(address, overrides)
    at_work = [process.record for process in RunStatus.read(opened).at_work]
    uri = opened.home.uri
    if not at_work:
        raise InvalidInput(f"{uri}: no process is at work, so no step can be traced; start it with baton run")
    names = ", ".join(f"{record.pid} on {record.host}" for record in at_work)
    say(f"asking process {names} for a trace of {counted(steps, 'step')}", aside=True)
    attempts = [record.attempt for record in at_work]

    def is_at_work() -> bool:
        now, asked = datetime.now(UTC), set(attempts)
        records = opened.attempts.read().records
        return any({record.attempt, record.within} & asked and is_alive(record, now=now) for record in records)

    answer = ask_for_trace(opened.home, steps, attempts, is_at_work=is_at_work)
    first, trace = 1 + (answer.first_step or 0), f"{uri}/{answer.trace}"
    if as_json:
        traced = {"first_step": first, "last_step": answer.last_step, "trace": trace}
        say_json({"run": opened.name, "home": uri, **traced})
        return
    rows = [("traced", f"steps {first} to {answer.last_step}"), ("trace", trace)]
    show = f"tensorboard --logdir {uri}/tensorboard  (with the package tensorboard-plugin-profile)"
    Output.to(sys.stdout).facts([*rows, ("show it with", show)])
