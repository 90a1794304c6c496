"""A model's metrics as numbers with names.

The result of a metric may be one number, several (`F1Score()` has one for each class), or a dict of both. A row and an
evaluation have one number for each name, so several become `f1_score/0`, `f1_score/1` and so on. What decides, such as
`checkpoint.keep_best` and a callback's monitor, needs one number.
"""

from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from tasks.foundation.contracts.run_spec import KeepBest
from tasks.foundation.errors import ModelError
from tasks.foundation.messages import listed
from tasks.foundation.model.returned_metrics import MOST_VALUES, ReturnedMetrics, as_numbers, flatten_metrics


@dataclass(slots=True)
class Results:
    """The results of all metrics at one moment.

    Attributes:
        numbers: what is logged, by name.
        shapes: shapes of the results with several numbers, by name. They are in `numbers` as `name/0`, `name/1`.
        left_out: what the results are that are not logged, by name, such as "a str".
    """

    numbers: dict[str, float] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, result: Any) -> None:
        """Add one result."""
        # A result may be a variable; under a strategy only its tensor has a single value.
        tensor = as_numbers(result.value if isinstance(result, keras.Variable) else result)
        if tensor is None:
            self.left_out[name] = "None" if result is None else f"a {type(result).__name__}"
            return
        array = np.asarray(tensor.numpy(), np.float64)
        if array.size == 1:
            self.numbers[name] = array.item()
        elif not 0 < array.size <= MOST_VALUES:
            self.left_out[name] = f"{array.size:,} numbers"
        else:
            self.shapes[name] = array.shape
            self.numbers |= {"/".join([name, *map(str, index)]): float(value) for index, value in np.ndenumerate(array)}

    def require_number(self, name: str, asked_by: str, *, prefix: str = "") -> None:
        """Refuse the name of a metric whose result is no single number; other names pass.

        Args:
            name: of a metric.
            asked_by: who needs it, for the message.
            prefix: what it calls metrics by, such as `val_`.

        Raises:
            ModelError: names the shape, or what else the result is.
        """
        remedy = 'make its result one number, for instance with average="macro"'
        if name in self.shapes:
            shape = self.shapes[name]
            raise ModelError(
                f"{asked_by} is a metric of shape {shape_words(shape)}, and one number decides; {remedy}, or name one "
                f"of {_names_of_elements(prefix + name, shape)}"
            )
        if name in self.left_out:
            raise ModelError(f"{asked_by} is a metric whose result is {self.left_out[name]}; {remedy}")

    def words(self) -> list[str]:
        """What a user should know of results that are no single numbers, a line each."""
        lines = [
            f"metric {name} has shape {shape_words(shape)}, and is logged as {_names_of_elements(name, shape)}"
            for name, shape in self.shapes.items()
        ]
        if self.left_out:
            what = listed([f"{name} ({words})" for name, words in self.left_out.items()])
            lines.append(f"not logged, because a result needs 1 to {MOST_VALUES} numbers: {what}")
        return lines


def read_results(model: keras.Model, strategy: Any, returned: ReturnedMetrics | None = None) -> Results:
    """Read all metrics. For arguments see `take_metrics`."""
    results = Results()
    with strategy.scope():
        values = dict(flatten_metrics("", model.get_metrics_result()))
        for name, value in (returned.of(values) if returned else values).items():
            results.add(name, value)
    return results


def take_metrics(model: keras.Model, strategy: Any, returned: ReturnedMetrics | None = None) -> dict[str, float]:
    """Read all metrics by name, nested ones as `outer/inner`, and reset them.

    Args:
        model: the model.
        strategy: the strategy in whose scope the metrics were created.
        returned: metrics of the values that a custom step returns.
    """
    numbers = read_results(model, strategy, returned).numbers
    with strategy.scope():
        model.reset_metrics()
        if returned is not None:
            returned.reset()
    return numbers


def require_metric(rule: KeepBest | None, results: Results) -> None:
    """Refuse `checkpoint.keep_best` if the model does not have its metric, or if that is no single number.

    Raises:
        ModelError: lists the model's metrics, or names the metric's shape.
    """
    if rule is None or rule.metric in results.numbers:
        return
    asked_by = f"checkpoint.keep_best.metric = {rule.metric!r}"
    results.require_number(rule.metric, asked_by)
    raise ModelError(f"{asked_by} is not a metric of the model; it has: {', '.join(sorted(results.numbers))}")


def shape_words(shape: tuple[int, ...]) -> str:
    """`(3)`, `(2, 4)`."""
    return f"({', '.join(map(str, shape))})"


def _names_of_elements(name: str, shape: tuple[int, ...]) -> str:
    first, last = (0 for _ in shape), (size - 1 for size in shape)
    return " to ".join("/".join([name, *map(str, index)]) for index in (first, last))
