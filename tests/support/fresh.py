"""Call one function of a module: `python -m tests.support.fresh MODULE FUNCTION ARGUMENTS`; both ways JSON.

The last line of standard output is the result.
"""

from flows.process.leaving import leaves_with  # isort: skip - registers first what is to be called last

import importlib
import json
import sys

from tasks.foundation.accelerator.environment import quiet_tensorflow

quiet_tensorflow()


def main(module: str, function: str, arguments: str) -> None:
    result = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    sys.stdout.write(f"result: {json.dumps(result)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
    # TensorFlow's own end, with eight replicas, has been seen to take two minutes.
    sys.exit(leaves_with(0))
