"""Prefect and TensorFlow without their chatter. Everything set here is a default: what a user has set holds."""

import os
import threading
import warnings

from tasks.foundation.accelerator.environment import quiet_tensorflow

_PREFECT_DEFAULTS = {
    # Run logs go to Prefect's API; the console is the command's own.
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    # Silences tracebacks at the embedded API's shutdown.
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
    # A fresh PREFECT_HOME beside a busy TensorFlow takes its time.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    # Usage data is sent only by those who ask for it.
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
}
_LOOPBACK = "127.0.0.1,localhost"


def quiet() -> None:
    """Call before Prefect and TensorFlow are imported."""
    quiet_tensorflow()
    # requests asks for this silence too, but its wish is lost when another thread imports at the same time.
    warnings.filterwarnings("ignore", message="SOCKS support in urllib3")
    for name, value in _PREFECT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    # The embedded API is on this machine; a proxy would swallow its websockets.
    for name in ("NO_PROXY", "no_proxy"):
        known = os.environ.get(name)
        os.environ[name] = f"{known},{_LOOPBACK}" if known else _LOOPBACK


def start_prefect_api() -> threading.Thread:
    """Start Prefect's embedded API, if none is configured, while TensorFlow is being imported.

    A failure is left to the flow, which starts it again and can say what is wrong.
    """
    import prefect.exceptions
    from prefect import get_client

    def start() -> None:
        try:
            get_client(sync_client=True)
        except (RuntimeError, OSError, prefect.exceptions.PrefectException):
            return

    thread = threading.Thread(target=start, name="prefect-api", daemon=True)
    thread.start()
    return thread
