"""What Prefect would throw into the middle of a segment, and how it waits until the work has ended."""

from collections.abc import Iterator
from contextlib import contextmanager

from prefect._internal.concurrency.cancellation import shield


@contextmanager
def lease_shield() -> Iterator[None]:
    """Within, a server that is away cannot end the flow run.

    A flow run of a deployment with a concurrency limit renews the lease of its slot every 225 seconds. If the server
    cannot be asked three times in a row, which takes some five seconds, Prefect 3.8.8 raises CancelledError in the main
    thread, wherever that is, so that no other flow run takes the slot beside it. Of the segment that is being trained
    nothing would be left. Baton needs no such care: whoever else comes, the log lets one of them commit. So the error
    waits here until the work has ended, behind the shield that Prefect has for its own work; the flow run has crashed
    then, all that it did is committed, and the next one goes on from there.

    Signals are not held up: cancelling a flow run is a SIGTERM.
    """
    with shield():
        yield
