"""The embedded server has no idle worker and says when to ask again; the lease shield against Prefect's lease renewal.

The shield is tested in a separate process, with a server that is down.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from prefect.context import SettingsContext, get_settings_context
from prefect.server.api import server
from prefect.settings import Settings
from starlette.responses import Response

from baton.flows.with_prefect.internals import leave_out_idle_worker, retried_soon
from baton.flows.with_prefect.server import _PREFECT_DEFAULTS, _UNUSED
from tests.support import forked

EMBEDDED = {**_PREFECT_DEFAULTS, **dict.fromkeys(_UNUSED, "false")}

# Counts the workers of background tasks, first with Prefect's own server, then with one beside it as it is embedded.
SERVERS = """
import asyncio, os
from baton.flows.with_prefect.internals import leave_out_idle_worker
from prefect.server.api.server import create_app

async def main():
    lifespans = []
    for prepare in (lambda: None, leave_out_idle_worker):
        prepare()
        served = create_app(ignore_cache=True)
        lifespans.append(served.router.lifespan_context(served))
        await lifespans[-1].__aenter__()
        names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]
        print("workers:", names.count("Worker.run_forever"), flush=True)
    os._exit(0)  # threads of the database would go on

asyncio.run(main())
"""

WORK = """
import sys, time, uuid
from contextlib import nullcontext
from prefect.concurrency._leases import maintain_concurrency_lease
from baton.flows.with_prefect.internals import worker_shield

shield = worker_shield() if sys.argv[1] == "shielded" else nullcontext()
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
def test_a_failed_lease_renewal_waits_for_the_shielded_work(tmp_path: Path) -> None:
    unused_address = "http://127.0.0.1:9/api"
    # Side by side, because both mostly wait.
    processes = {
        how: forked.Popen(
            [sys.executable, "-c", WORK, how],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PREFECT_API_URL": unused_address, "PREFECT_HOME": str(tmp_path / how)},
        )
        for how in ("shielded", "unshielded")
    }
    outputs = {how: process.communicate(timeout=300) for how, process in processes.items()}
    assert outputs["shielded"][0].splitlines() == ["the work is done", "CancelledError"], outputs["shielded"][1]
    assert outputs["unshielded"][0].splitlines() == ["CancelledError"], outputs["unshielded"][1]


@pytest.mark.slow
def test_the_embedded_server_has_no_idle_worker(tmp_path: Path) -> None:
    environment = {**os.environ, **EMBEDDED, "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT_HOME": str(tmp_path)}
    command = [sys.executable, "-c", SERVERS]
    done = forked.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.stdout.splitlines()[-2:] == ["workers: 1", "workers: 1"], done.stderr


def test_services_that_the_user_wants_keep_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    own = server.background_worker
    monkeypatch.setattr(server, "background_worker", own)  # and again after the test
    chosen = {"PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "true"}
    for name, value in (EMBEDDED | chosen).items():
        monkeypatch.setenv(name, value)
    with SettingsContext(profile=get_settings_context().profile, settings=Settings()):
        leave_out_idle_worker()
    assert server.background_worker is own


@pytest.mark.parametrize(("status", "seconds"), [(503, "0.3"), (200, None), (404, None)])
def test_a_request_that_found_the_database_locked_is_repeated_soon(status: int, seconds: str | None) -> None:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(retried_soon(Response("{}", status)))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.get("/")

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.headers.get("Retry-After"), answer.text) == (status, seconds, "{}")
