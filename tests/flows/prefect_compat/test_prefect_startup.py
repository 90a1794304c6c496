"""Prefect's embedded server is started once, and the error of a failed start quotes the server's log."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.server.api import server as prefect_server
from prefect.settings import PREFECT_API_URL, PREFECT_HOME, PREFECT_SERVER_EPHEMERAL_ENABLED, temporary_settings

from flows.prefect_compat import prefect_startup
from tasks.foundation.errors import PrefectUnavailable

EMBEDDED = {PREFECT_SERVER_EPHEMERAL_ENABLED: True}


def test_prefect_still_has_the_internals_that_startup_uses() -> None:
    assert prefect_server.subprocess is not None
    assert isinstance(prefect_server.SubprocessASGIServer._instances, dict)
    assert hasattr(prefect_server.SubprocessASGIServer(), "server_process")


class FakeEmbedding:
    """Makes Prefect start another program as its embedded server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
        monkeypatch.setenv("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")
        self.starts = 0

        def start(_: object) -> subprocess.Popen[Any]:
            self.starts += 1
            return prefect_startup.ServerSubprocess().Popen(args=[sys.executable, "-c", code])

        monkeypatch.setattr(prefect_server.SubprocessASGIServer, "_run_uvicorn_command", start)
        monkeypatch.setattr(prefect_server.SubprocessASGIServer, "_instances", {})
        monkeypatch.setattr(prefect_server, "atexit", SimpleNamespace(register=lambda _stop: None))


def test_a_failing_server_is_started_once_and_quoted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = "'no such revision\\nERROR:    Application startup failed. Exiting.'"
    embedding = FakeEmbedding(monkeypatch, f"import sys; print({log}, file=sys.stderr); sys.exit(3)")
    with temporary_settings({PREFECT_API_URL: None, PREFECT_HOME: tmp_path, **EMBEDDED}):
        api = prefect_startup.ServerStart()
        api.run()
    with pytest.raises(PrefectUnavailable, match="does not start: no such revision"):
        api.wait()
    assert embedding.starts == 1


def test_a_port_in_use_is_not_a_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")
    code = "import sys; print('[Errno 98] address already in use', file=sys.stderr); sys.exit(3)"
    process = prefect_startup.ServerSubprocess().Popen(args=[sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.poll() == 3
