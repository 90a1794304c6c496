"""The lease shield against Prefect's own lease renewal, in a separate process, with a server that is down."""

import os
import sys
from pathlib import Path

import pytest

from tests.support import forked

WORK = """
import sys, time, uuid
from contextlib import nullcontext
from prefect.concurrency._leases import maintain_concurrency_lease
from flows.prefect_compat.lease_shield import lease_shield

shield = lease_shield() if sys.argv[1] == "shielded" else nullcontext()
try:
    # Prefect's engine does this around every flow run of a deployment with a concurrency limit.
    with maintain_concurrency_lease(uuid.uuid4(), 300, raise_on_lease_renewal_failure=True):
        with shield:
            for _ in range(100):
                time.sleep(0.2)
            print("the work is done")
        time.sleep(1)
except BaseException as fault:
    print(type(fault).__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "output"), [("shielded", ["the work is done", "CancelledError"]), ("unshielded", ["CancelledError"])]
)
def test_a_failed_lease_renewal_waits_for_the_shielded_work(how: str, output: list[str], tmp_path: Path) -> None:
    unused_address = "http://127.0.0.1:9/api"
    done = forked.run(
        [sys.executable, "-c", WORK, how],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"PREFECT_API_URL": unused_address, "PREFECT_HOME": str(tmp_path)},
    )
    assert done.stdout.splitlines() == output, done.stderr[-3000:]
