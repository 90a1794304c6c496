"""Trains run files that are refused, one after the other in one process, and prints their messages as JSON.

python tests/support/refused_runs.py FOLDER...
"""

import json
import os
import sys
from pathlib import Path

from baton.flows.opened_run import OpenedRun
from baton.flows.result import Goal
from baton.flows.train import train
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.errors import BatonError
from baton.tasks.foundation.telemetry.events import Silent


def main() -> None:
    found = {}
    for name in sys.argv[1:]:
        os.chdir(name)
        try:
            run = OpenedRun.open(load_run_file(Path("run.yaml"), []))
            train(run, Goal.of(run.spec), telemetry=Silent())
        except BatonError as fault:
            found[name] = (fault.exit_code, f"error: {fault}\n")
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
