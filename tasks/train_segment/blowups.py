"""Detect a loss that blows up. It reads logged rows only, so the result does not depend on how a run is cut."""

import statistics
from collections import deque
from collections.abc import Iterable

from tasks.foundation.contracts.segment import MetricRow
from tasks.foundation.errors import BlowUp

# A median of fewer rows is too noisy; one of more rows would include old losses.
MIN_ROWS = 5
MEDIAN_ROWS = 21
_LOSS = "loss"


class LossWatch:
    """Compares each logged loss with the running median of the losses before it."""

    def __init__(self, factor: float | None, rows: Iterable[MetricRow] = ()) -> None:
        """Start with the rows that the run has logged so far.

        Args:
            factor: a loss above `factor` times the median is a blow-up; None turns detection off.
            rows: the last `MEDIAN_ROWS` rows before the checkpoint that training starts from, oldest first.
        """
        self._factor = factor
        self._losses: deque[float] = deque(maxlen=MEDIAN_ROWS)
        for row in rows:
            self._add(row)

    def check(self, row: MetricRow) -> None:
        """Check a new row.

        Raises:
            BlowUp: its loss is more than `factor` times the absolute value of the running median.
        """
        loss = row.metrics.get(_LOSS)
        if self._factor is not None and loss is not None and len(self._losses) >= MIN_ROWS:
            median = statistics.median(self._losses)
            if loss > self._factor * abs(median):
                raise BlowUp(
                    f"the loss logged at step {row.step} is {loss:.4g}, more than train.blowup_factor = "
                    f"{self._factor:g} times the median {median:.4g} of the {len(self._losses)} rows before; this is "
                    "not committed. Lower the learning rate, clip gradients, or look at the data of these steps",
                    step=row.step,
                )
        self._add(row)

    def _add(self, row: MetricRow) -> None:
        if _LOSS in row.metrics:
            self._losses.append(row.metrics[_LOSS])
