"""Call a function of a module: `python -m tests.support.call_function MODULE FUNCTION ARGUMENTS`.

The arguments are JSON. The last line of standard output is the result as JSON.
"""

from baton.flows.process import exits_with  # isort: skip - registers first what is to be called last

import importlib
import json
import sys

from baton.tasks.foundation.machine.environment import quiet_tensorflow

quiet_tensorflow()


def main(module: str, function: str, arguments: str) -> None:
    result = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    sys.stdout.write(f"result: {json.dumps(result)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
    # TensorFlow's teardown with eight replicas can take two minutes.
    sys.exit(exits_with(0))
