"""A server that is away when a lease is to be renewed: Prefect's own renewal, in a process of its own."""

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

held = lease_shield() if sys.argv[1] == "held" else nullcontext()
try:
    # As Prefect's engine does it around every flow run of a deployment with a concurrency limit.
    with maintain_concurrency_lease(uuid.uuid4(), 300, raise_on_lease_renewal_failure=True):
        with held:
            for _ in range(100):
                time.sleep(0.2)
            print("the work has ended")
        time.sleep(1)
except BaseException as fault:
    print(type(fault).__name__)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"), [("held", ["the work has ended", "CancelledError"]), ("bare", ["CancelledError"])]
)
def test_work_is_not_ended_for_a_lease_that_could_not_be_renewed(how: str, said: list[str], tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:9/api"
    done = forked.run(
        [sys.executable, "-c", WORK, how],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"PREFECT_API_URL": nobody, "PREFECT_HOME": str(tmp_path)},
    )
    assert done.stdout.splitlines() == said, done.stderr[-3000:]
