"""What relies on Prefect's internals, each with its reason.

Besides the names here, Baton relies on internals of Prefect 3.9.1 in two places: `server.py` serves the application of
Prefect's embedded server (`prefect.server.api.server.create_app`), and sets the settings of this process; and
`artifacts.py` updates artifacts without the event that has their data.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_RETRY_SECONDS: Final = b"0.3"


def leave_out_idle_worker() -> None:
    """Let the server have no worker of background tasks if no service that comes back is on, as in `server.py`.

    It looks for work ten times a second, three quarters of what an idle server does; its other tasks follow from the
    polls of a deployment's worker and from deletions.
    """
    from prefect.server.api import server
    from prefect.server.services.perpetual_services import get_enabled_perpetual_services

    if not get_enabled_perpetual_services(ephemeral=True):
        setattr(server, "background_worker", lambda *_given, **_named: nullcontext())  # noqa: B010 - for mypy


def retried_soon(app: "ASGIApp") -> "ASGIApp":
    """Let clients repeat a request soon that found the database locked, which is free again at once.

    Prefect's server answers 503 if another request has written since one began to read, and its client waits for two
    seconds if the answer does not say how long. The last stages of a run end together, so a command often waited.
    """

    async def serve(scope: "Scope", receive: "Receive", send: "Send") -> None:
        async def answer(message: "Message") -> None:
            if message.get("status") == HTTPStatus.SERVICE_UNAVAILABLE:
                message["headers"] = [*message["headers"], (b"retry-after", _RETRY_SECONDS)]
            await send(message)

        await app(scope, receive, answer)

    return serve


@contextmanager
def worker_shield() -> Iterator[None]:
    """Keep a server that is down, or a worker that is gone, from ending the flow run before the work here is done.

    A flow run of a deployment with a concurrency limit renews the lease of its slot every 225 seconds. After three
    failed requests in a row, some five seconds, Prefect 3.9.1 raises CancelledError in the main thread, wherever it is,
    because another flow run may now take the slot. The segment in training would be lost. Baton does not need this: its
    log lets only one process commit. So the error waits behind the shield that Prefect uses for its own work. The flow
    run then crashes after the work is committed, and the next flow run continues from there.

    A worker reads the output of its flow runs from pipes. Once it is gone, a line of Prefect's log would end the
    process, because rich raises SystemExit then, and a `print` of the user's code would fail.

    Signals are not delayed: Prefect cancels a flow run with SIGTERM.
    """
    from prefect._internal.concurrency.cancellation import shield
    from rich.console import Console

    from baton.flows.process import tolerate_closed_readers  # the server's process does without

    # It stays: the engine logs how the flow run ended.
    setattr(Console, "on_broken_pipe", lambda console: setattr(console, "quiet", True))  # noqa: B010 - for mypy
    with shield(), tolerate_closed_readers():
        yield
