"""Delays the error that Prefect raises in the middle of a segment when it cannot renew a concurrency lease."""

from collections.abc import Iterator
from contextlib import contextmanager

from prefect._internal.concurrency.cancellation import shield


@contextmanager
def lease_shield() -> Iterator[None]:
    """Keep a server that is down from ending the flow run before the work in this context is done.

    A flow run of a deployment with a concurrency limit renews the lease of its slot every 225 seconds. After three
    failed requests in a row, some five seconds, Prefect 3.8.8 raises CancelledError in the main thread, wherever it is,
    because another flow run may now take the slot. The segment in training would be lost. Baton does not need this: its
    log lets only one process commit. So the error waits behind the shield that Prefect uses for its own work. The flow
    run then crashes after the work is committed, and the next flow run continues from there.

    Signals are not delayed: Prefect cancels a flow run with SIGTERM.
    """
    with shield():
        yield
