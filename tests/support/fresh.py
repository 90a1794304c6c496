"""Call one function of one file: `python fresh.py FILE FUNCTION ARGUMENTS-AS-JSON`; the last line tells its result."""

from flows.commands.leaving import leaves_with  # isort: skip - registers first what is to be called last

import importlib.util
import json
import sys
from pathlib import Path

from tasks.foundation.accelerator.environment import quiet_tensorflow

quiet_tensorflow()


def main(file: str, function: str, arguments: str) -> None:
    sys.path.insert(0, str(Path(file).parent))
    spec = importlib.util.spec_from_file_location("fresh_module", file)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(file)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fresh_module"] = module
    spec.loader.exec_module(module)
    result = getattr(module, function)(**json.loads(arguments))
    sys.stdout.write(f"result: {json.dumps(result)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
    # TensorFlow's own end, with eight replicas, has been seen to take two minutes.
    sys.exit(leaves_with(0))
