"""What Prefect's UI shows of a run, as a function of its log; and where it goes, Prefect's artifacts."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal, Protocol
from urllib.parse import quote
from uuid import UUID

from tasks.foundation.contracts.log_entry import Evaluation
from tasks.foundation.runlog.history import History, commit_of
from tasks.foundation.telemetry.events import Training
from tasks.foundation.telemetry.formatting import duration_words, metric_words, short_path, size_words, step_words

# What a browser on the user's machine opens for who may read the object.
_CONSOLE = "https://storage.cloud.google.com/"
_ROWS_UP_TO = 500
_PICTURES_UP_TO = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One artifact as it is to be now.

    Attributes:
        key: lower-case letters, digits and dashes; the same key is the same artifact, in a later state.
        kind: how the UI shows `data`.
        data: as Prefect stores it: per cent, rows as JSON, or Markdown.
        description: one line.
    """

    key: str
    kind: Literal["progress", "table", "markdown"]
    data: Any
    description: str


class Board(Protocol):
    """Where artifacts are put up."""

    def put(self, artifact: Artifact) -> None:
        """Make it, or bring it up to date; raises whatever goes wrong."""


def key_of(run: str, part: str) -> str:
    """The key of a run's artifact: its name as far as keys may hold it, and told apart where they may not."""
    plain = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if plain != run:
        plain = f"{plain}-{hashlib.sha256(run.encode()).hexdigest()[:6]}".lstrip("-")
    return f"{plain}-{part}"


def progress_of(run: str, *, step: int, target: int, now: Training | None) -> Artifact:
    """How far the run is, in per cent of the step that it goes to.

    Args:
        run: its name.
        step: the newest step, committed or not.
        target: train.steps.
        now: what training said last in this process, if it did.
    """
    words = [step_words(step, target)]
    if now is not None and now.metrics:
        words.append(metric_words(now.metrics).replace("  ", ", "))
    if now is not None and step < target:
        words.append(f"{now.examples_per_second:,.0f} examples/s")
    percent = min(100.0, 100.0 * step / target)
    return Artifact(key=key_of(run, "progress"), kind="progress", data=percent, description=", ".join(words))


def commits_of(run: str, history: History) -> Artifact:
    """A table of the commits on the way to the tip, newest first: a long run's end is what is looked for."""
    evaluated = {evaluation.checkpoint.path: evaluation for evaluation in history.evaluations}
    newest = history.commits[: -_ROWS_UP_TO - 1 : -1]
    rows = []
    for entry in newest:
        commit = commit_of(entry)
        ref = commit.checkpoint
        rows.append(
            {
                "step": ref.step,
                "training": _words(commit.history[-1].metrics if commit.history else {}),
                "validation": _validation(evaluated.get(ref.path)),
                "ended by": commit.exit_reason.replace("_", " "),
                "size": size_words(ref.size),
                "took": duration_words(sum(commit.seconds.values())) if commit.seconds else "",
                "committed, UTC": entry.time[:19].replace("T", " "),
                "checkpoint": short_path(ref.path).removeprefix("checkpoints/"),
            }
        )
    count = len(history.commits)
    shown = f"{count} commits" if count <= _ROWS_UP_TO else f"the newest {_ROWS_UP_TO} of {count} commits"
    # As Prefect's own `create_table_artifact` does.
    return Artifact(key=key_of(run, "commits"), kind="table", data=json.dumps(rows), description=f"{shown} of {run}")


def curves_of(run: str, history: History) -> Artifact | None:
    """The report's curves; None where nothing was trained yet.

    Markdown, since Prefect's page of an image artifact prints the whole address below the picture, here some 30 kB.

    Raises:
        ImportError: matplotlib is not there.
    """
    from tasks.evaluate.report.plots import draw

    plots = draw(history, {})[:_PICTURES_UP_TO]
    if not plots:
        return None
    pictures = (
        f"![{_alt(plot.caption)}](data:image/png;base64,{base64.b64encode(plot.png).decode()})" for plot in plots
    )
    step = history.head.tip.step if history.head is not None and history.head.tip is not None else 0
    return Artifact(
        key=key_of(run, "curves"), kind="markdown", data="\n\n".join(pictures), description=f"curves up to step {step}"
    )


def report_of(run: str, address: str) -> Artifact:
    """Where the report is: a link where a browser can follow one, else the path, which no web page may open.

    Args:
        run: its name.
        address: of the page, gs://… or a path.
    """
    if address.startswith("gs://"):
        link = f"{_CONSOLE}{quote(address.removeprefix('gs://'))}"
        text = f"[report of {run}]({link})\n\n`{address}`"
    else:
        text = f"The report of {run} is a file on the machine or disk that the run is kept on:\n\n`{address}`"
    return Artifact(
        key=key_of(run, "report"), kind="markdown", data=text, description="curves, times and checkpoints on one page"
    )


class PrefectBoard:
    """The artifacts of one flow run, through Prefect's API; for one thread."""

    def __init__(self, flow_run_id: UUID, *, patience_seconds: float) -> None:
        """Nothing is asked yet.

        Args:
            flow_run_id: whose artifacts they are.
            patience_seconds: how long one request may take; none is tried twice.
        """
        self._flow_run_id = flow_run_id
        self._patience_seconds = patience_seconds
        self._ids: dict[str, UUID] = {}
        self._client: Any = None

    def put(self, artifact: Artifact) -> None:
        """See `Board`."""
        from prefect.client.orchestration import get_client
        from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
            if self._client is None:
                # Not the engine's, which waits a minute for a server that is gone.
                client = get_client(httpx_settings={"timeout": self._patience_seconds}, sync_client=True)
                self._client = client.__enter__()
            try:
                self._put(self._client, artifact)
            except Exception:
                client, self._client = self._client, None
                client.__exit__(None, None, None)
                raise

    def _put(self, client: Any, artifact: Artifact) -> None:
        from prefect.client.schemas.actions import ArtifactCreate
        from prefect.exceptions import PrefectHTTPStatusError

        known = self._ids.get(artifact.key) or self._of_earlier_process(client, artifact)
        if known is not None:
            changed = {"data": artifact.data, "description": artifact.description}
            try:
                # Not `client.update_artifact`, which emits an event with all of the data each time.
                client.request("PATCH", "/artifacts/{id}", json=changed, path_params={"id": known})
            except PrefectHTTPStatusError as fault:
                if fault.response.status_code != HTTPStatus.NOT_FOUND:
                    raise  # else the database was set up anew: made again
            else:
                self._ids[artifact.key] = known
                return
        made = client.create_artifact(
            ArtifactCreate(
                key=artifact.key,
                type=artifact.kind,
                data=artifact.data,
                description=artifact.description,
                flow_run_id=self._flow_run_id,
            )
        )
        self._ids[artifact.key] = made.id

    def _of_earlier_process(self, client: Any, artifact: Artifact) -> UUID | None:
        """The same flow run may have been executed before, and its artifact is there."""
        from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey

        mine = ArtifactFilter(
            flow_run_id=ArtifactFilterFlowRunId(any_=[self._flow_run_id]), key=ArtifactFilterKey(any_=[artifact.key])
        )
        found: Sequence[Any] = client.read_artifacts(artifact_filter=mine, limit=1)
        return found[0].id if found else None


def _validation(evaluation: Evaluation | None) -> str:
    return "" if evaluation is None else _words(evaluation.metrics)


def _words(metrics: Mapping[str, float]) -> str:
    return metric_words(metrics).replace("  ", ", ")


def _alt(caption: str) -> str:
    """A metric may be named in any way; brackets would end the picture's text."""
    return re.sub(r"[\[\]\\\n]", " ", caption)
