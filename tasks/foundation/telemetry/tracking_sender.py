"""A thread that keeps a tracker up to date, so that no training and no commit waits for it."""

import logging
import threading

from tasks.foundation.telemetry.tracking import TrackedRun

_LOGGER = logging.getLogger(__name__)


class TrackingSender(threading.Thread):
    """Updates a tracker now, whenever there is news, and at the end.

    It is a daemon: a server that does not respond must not keep the process.

    Attributes:
        news: set when the log has grown.
    """

    def __init__(self, tracked: TrackedRun) -> None:
        """Send nothing before it is started.

        Args:
            tracked: only this thread uses it.
        """
        super().__init__(name="baton-tracking", daemon=True)
        self.news = threading.Event()
        self.news.set()
        self._tracked = tracked
        self._ending = False
        self._is_sent = False

    def run(self) -> None:
        """Update until told to end; then once more, and close the tracker."""
        while True:
            self.news.wait()
            self.news.clear()
            ending = self._ending  # read first: news after it is seen by the next round
            if ending:
                self._is_sent = self._tracked.close()
                return
            self._tracked.update()

    def end(self, seconds: float) -> None:
        """Update once more, and wait for it at most for `seconds`. A warning says if not everything was sent."""
        self._ending = True
        self.news.set()
        self.join(seconds)
        if self.is_alive() or not self._is_sent:
            _LOGGER.warning("the tracker does not have all curves; the next command on this run sends the rest")
