"""Several runs beside each other: their settings, metrics and curves, from their logs alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flows.opened_run import RunHome
from tasks.foundation.contracts.identity import differences
from tasks.foundation.contracts.log_entry import Best, Environment, Head
from tasks.foundation.contracts.run_spec import recorded_epoch
from tasks.foundation.runlog.history import History, commit_of, history_of

ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One of the runs.

    Attributes:
        name: of the run, made unique among those that are compared.
        home: its address.
        head: the newest state.
        history: the curves.
    """

    name: str
    home: str
    head: Head
    history: History

    @property
    def step(self) -> int:
        """Of the tip; 0 if there is none."""
        return 0 if self.head.tip is None else self.head.tip.step

    @property
    def epoch(self) -> float | None:
        """Epochs that are done; None if the log does not know their length."""
        length = recorded_epoch(self.head.identity)
        return None if length is None else length.after(self.step)

    @property
    def training(self) -> Mapping[str, float]:
        """The last row of metrics."""
        return self.history.rows[-1].metrics if self.history.rows else {}

    @property
    def validation(self) -> Mapping[str, float]:
        """The newest evaluation on the validation set."""
        return self.history.evaluations[-1].metrics if self.history.evaluations else {}

    @property
    def test(self) -> Mapping[str, float]:
        """The newest evaluation on the test set."""
        return self.history.tests[-1].metrics if self.history.tests else {}

    @property
    def best(self) -> Best | None:
        """The best evaluation, by `checkpoint.keep_best`."""
        return self.head.best

    @property
    def seconds(self) -> float:
        """In committed segments, all causes together."""
        return sum(self.history.seconds.values())

    @property
    def examples_per_second(self) -> float | None:
        """While training; None if the log does not say it."""
        commits = [commit_of(entry) for entry in self.history.commits]
        seconds = sum(commit.seconds.get("train", 0.0) for commit in commits)
        return sum(commit.examples for commit in commits) / seconds if seconds > 0 else None


def compared(runs: Sequence[RunHome]) -> list[ComparedRun]:
    """Read the logs of runs. Runs of the same name are told apart by a number.

    Raises:
        NoSuchRun: one of them has no log.
        RunLogError: an entry of a log cannot be read.
    """
    found: list[ComparedRun] = []
    for run in runs:
        run.require_head()
        history = history_of(run.log.entries(blocks="read"))
        names = {other.name for other in found}
        count = 1 + sum(other.name.partition(" (")[0] == run.name for other in found)
        name = f"{run.name} ({count})" if run.name in names or count > 1 else run.name
        head = run.require_head() if history.head is None else history.head
        found.append(ComparedRun(name=name, home=run.home.uri, head=head, history=history))
    return found


def differing_settings(runs: Sequence[ComparedRun]) -> dict[str, list[object]]:
    """The identity and the environment where not all runs agree: by key, the value of each run."""
    first, values = runs[0], dict[str, list[object]]()
    for place, run in enumerate(runs):
        for key, old, new in _differences(first.head, run.head):
            values.setdefault(key, [old] * len(runs))[place] = new
    return values


def _differences(one: Head, other: Head) -> list[tuple[str, object, object]]:
    found = [(each.key, each.recorded, each.now) for each in differences(one.identity, other.identity)]
    before, after = one.environment.facts(), other.environment.facts()
    names = {key: f"environment.{key}" if key in Environment.model_fields else key for key in [*before, *after]}
    return found + [
        (name, before.get(key, ABSENT), after.get(key, ABSENT))
        for key, name in names.items()
        if before.get(key, ABSENT) != after.get(key, ABSENT)
    ]


def metric_names(runs: Sequence[ComparedRun]) -> list[str]:
    """All metrics of the curves, the loss first."""
    names = dict.fromkeys(
        name
        for run in runs
        for metrics in (*(row.metrics for row in run.history.rows), *(each.metrics for each in run.history.evaluations))
        for name in metrics
    )
    return sorted(names, key=lambda name: name != "loss")


def training_curve(run: ComparedRun, metric: str) -> list[tuple[int, float]]:
    """Step and value of a metric in the training."""
    return [(row.step, row.metrics[metric]) for row in run.history.rows if metric in row.metrics]


def validation_curve(run: ComparedRun, metric: str) -> list[tuple[int, float]]:
    """Step and value of a metric on the validation set."""
    return [(each.checkpoint.step, each.metrics[metric]) for each in run.history.evaluations if metric in each.metrics]
