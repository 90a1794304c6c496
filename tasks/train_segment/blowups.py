"""When has a loss run away? Judged at log steps, by what the log holds, so that it is the same however a run is cut."""

import statistics
from collections import deque
from collections.abc import Iterable

from tasks.foundation.contracts.segment import MetricRow
from tasks.foundation.errors import BlowUp

# The median of fewer rows says too little; more rows would remember a loss that has long been left behind.
ROWS_BEFORE_A_VERDICT = 5
MEDIAN_ROWS = 21
_LOSS = "loss"


class LossWatch:
    """Compares each logged loss with the running median of those before it."""

    def __init__(self, factor: float | None, rows: Iterable[MetricRow] = ()) -> None:
        """The rows that a run has logged so far say where the median stands.

        Args:
            factor: how many times the median is a blow-up; None: nothing is.
            rows: the last `MEDIAN_ROWS` rows on the way to the checkpoint that training starts from, oldest first.
        """
        self._factor = factor
        self._losses: deque[float] = deque(maxlen=MEDIAN_ROWS)
        for row in rows:
            self._remember(row)

    def look_at(self, row: MetricRow) -> None:
        """Judge a new row.

        Raises:
            BlowUp: its loss is more than `factor` times the running median, in absolute terms.
        """
        loss = row.metrics.get(_LOSS)
        if self._factor is not None and loss is not None and len(self._losses) >= ROWS_BEFORE_A_VERDICT:
            median = statistics.median(self._losses)
            if loss > self._factor * abs(median):
                raise BlowUp(
                    f"the loss logged at step {row.step} is {loss:.4g}, more than train.blowup_factor = "
                    f"{self._factor:g} times the median {median:.4g} of the {len(self._losses)} rows before; this is "
                    "not committed. Lower the learning rate, clip gradients, or look at the data of these steps",
                    step=row.step,
                )
        self._remember(row)

    def _remember(self, row: MetricRow) -> None:
        if _LOSS in row.metrics:
            self._losses.append(row.metrics[_LOSS])
