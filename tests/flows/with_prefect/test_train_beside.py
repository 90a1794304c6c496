"""A run starts without Prefect; `test_run_flows.py` has the run beside its flow run."""

import subprocess
import sys

# What a run imports before its first step, besides TensorFlow.
_CODE = """
import sys
import flows.with_prefect.train_beside, flows.relay, flows.with_prefect.server
assert not {"prefect", "tensorflow"} & sys.modules.keys()
"""


def test_start_of_a_run_imports_no_prefect() -> None:
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
