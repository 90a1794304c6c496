"""`run_without_prefect.py` with a wall clock that starts in 1985 and goes back an hour at each reading."""

import itertools
import sys
import time
from datetime import datetime, timedelta, tzinfo

from baton.flows import train as trainer
from baton.tasks.foundation.log import log

_READ = itertools.count()


class Back(datetime):
    """A datetime whose `now` runs backwards."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "Back":
        return cls(1985, 12, 1, tzinfo=tz) - timedelta(hours=next(_READ))


if __name__ == "__main__":
    log.datetime = Back
    time.time = lambda: 500_000_000.0 - 3600 * next(_READ)
    sys.exit(trainer.main(sys.argv[1:]))
