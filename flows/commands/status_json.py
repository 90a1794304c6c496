"""Types of the JSON object that `baton status --json` prints."""

from collections.abc import Mapping, Sequence
from typing import TypedDict


class CheckpointJson(TypedDict):
    """A retained or quarantined checkpoint."""

    path: str
    step: int
    size: int
    state_digest: str


class WholeReadJson(TypedDict):
    """A retained checkpoint that was restored, or read whole again, and when."""

    path: str
    time: str


class EvaluationJson(TypedDict):
    """The newest evaluation on the validation or the test set."""

    step: int
    path: str
    metrics: Mapping[str, float]
    examples: int


class BestJson(TypedDict):
    """The best evaluation."""

    step: int
    path: str
    metric: str
    mode: str
    value: float


class WeightsJson(TypedDict):
    """A source of the initial weights."""

    source: str
    place: str
    variables: int


class WorkerJson(TypedDict):
    """A host, see `Worker`."""

    host: int
    replicas: int
    steps: int
    examples: int
    train_seconds: float
    input_wait_seconds: float
    losses: Sequence[float]
    straggles: bool
    step_seconds: float
    input_wait_share: float


class AtWorkJson(TypedDict):
    """A process that trains the run, see `AttemptRecord`."""

    attempt: str
    host: str
    pid: int
    began: str
    alive: str
    from_step: int
    step: int
    epoch: float | None
    committed_step: int
    doing: str
    within: str | None
    silent_seconds: float
    steps_per_second: float | None
    seconds_left: float | None


class CommitsJson(TypedDict):
    """How often the run commits within a segment: as the run file says, and with `auto` as the last attempt found."""

    every_seconds: float | str | None
    pace: Mapping[str, float] | None


class AuditJson(TypedDict):
    """The newest receipt of `baton audit`; the facts are null if it cannot be read."""

    receipt: str
    time: str | None
    verdict: str | None
    steps: int
    first_differing_step: int | None


class RunJson(TypedDict):
    """The state of a run, from its log."""

    run: str
    home: str
    step: int
    target: int | None
    epoch: float | None
    segments: int
    entry: int
    base: int
    checkpoint: str | None
    state_digest: str | None
    last_commit: str | None
    metrics: Mapping[str, float]
    evaluation: EvaluationJson | None
    test: EvaluationJson | None
    best: BestJson | None
    read_whole: list[WholeReadJson]
    retained: list[CheckpointJson]
    quarantined: list[CheckpointJson]
    skipped_batches: int
    finished: dict[str, object] | None
    forked_from: dict[str, object] | None
    seconds: Mapping[str, float]
    account: dict[str, object] | None
    initialized_from: list[WeightsJson]
    workers: list[WorkerJson]
    environment: dict[str, object]


class StatusJson(RunJson):
    """The state of a run, and the processes that train it; `state` is unknown where nothing says the target."""

    state: str
    at_work: list[AtWorkJson]
    commits: CommitsJson
    audit: AuditJson | None
