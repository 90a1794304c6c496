"""Serve Prefect's API on an open socket: `python -P serve_api.py DESCRIPTOR`.

`flows.prefect_compat.embedded_server` starts this script. It serves the application that Prefect's own command line for
its embedded server serves, and imports it without garbage collection, which saves a fifth of the time.

Relies on internals of Prefect 3.8.8: `create_app`, and the environment variables `PREFECT__SERVER_...`.
"""

import gc
import socket
import sys
from typing import Final

_STARTUP_FAILURE: Final = 3  # uvicorn's exit code


def main(descriptor: int) -> int:
    """Serve until SIGTERM.

    Args:
        descriptor: file descriptor of the listening socket.

    Returns:
        The exit code: 0, or 3 if the server did not start.
    """
    gc.disable()  # the imports create millions of objects and next to no garbage
    import uvicorn
    from prefect.server.api.server import create_app

    config = uvicorn.Config(create_app(), log_level="error", lifespan="on")
    gc.freeze()
    gc.enable()
    server = uvicorn.Server(config)
    server.run(sockets=[socket.socket(fileno=descriptor)])
    return 0 if server.started else _STARTUP_FAILURE


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
