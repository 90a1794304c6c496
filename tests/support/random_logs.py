"""Logs of random entries of every kind."""

import random

from baton.tasks.foundation.contracts.log_entry import (
    Body,
    Commit,
    Entry,
    Head,
    LoggedValues,
    MetricRow,
    Quarantine,
    Retire,
    Rewind,
    WorkerStats,
)
from baton.tasks.foundation.log.log import RunLog
from tests.support.small_logs import evaluation, on_test, ref


def next_commit(head: Head, chance: random.Random) -> Commit:
    step = 10 + (head.tip.step if head.tip else 0)
    hosts = chance.choice([0, 1, 1, 2])
    stats = (
        WorkerStats(host=host, replicas=1, steps=10, examples=80, train_seconds=0.25, input_wait_seconds=0.125,
                    losses=(chance.random(),))
        for host in range(hosts)
    )  # fmt: skip
    return Commit(
        checkpoint=ref(step, head.base),
        parent=None if head.tip is None else head.tip.path,
        exit_reason=chance.choice(["segment_end", "interval"]),
        history=(MetricRow(step=step, metrics={"loss": chance.random()}),) * chance.randrange(3),
        partial=MetricRow(step=step, metrics={"loss": 0.5}) if step % 20 else None,
        seconds={"train": 0.5, "restore": 0.25},
        workers=tuple(stats),
        logged=(LoggedValues(step=step, on="row", values={"a": chance.random()}),) * chance.choice([0, 0, 1]),
        metadata=chance.choice([None, None, {}, {"team": "vision", "try": chance.random()}]),
        target=1000 + head.number if step % 30 else None,  # some commits do not say it
    )


def reads(head: Head, chance: random.Random) -> tuple[str, ...]:
    """Some of the retained checkpoints."""
    return tuple(ref.path for ref in head.retained if chance.random() < 0.1)


def anything(head: Head, chance: random.Random) -> Body:
    kept = list(head.retained)
    kind = chance.choice(["commit"] * 4 + ["evaluate", "evaluate", "test", "retire", "quarantine", "rewind"])
    if kind in {"evaluate", "test"} and kept:
        gone = [ref(5, 3, "gone"), *head.quarantined]
        made = evaluation if kind == "evaluate" else on_test
        body = made(chance.choice([kept[-1], kept[-1], *kept, *gone]), accuracy=chance.random())
        values = {"note": f"{chance.random()}"} if chance.random() < 0.3 and kind == "evaluate" else {}
        return body.model_copy(update={"logged": values} if values else {})
    if kind == "retire" and len(kept) > 4:
        return Retire(paths=(kept[1].path,), deleted=())
    if kind == "quarantine" and len(kept) > 1:
        return Quarantine(path=chance.choice([kept[-1], *kept]).path, reason="damaged")
    if kind == "rewind" and len(kept) > 1:
        to = chance.choice(kept[:-1])
        return Rewind(to=to, blown_up_at=to.step + 5, reason="NaN", skip_batches=3)
    return next_commit(head, chance).model_copy(update={"read": reads(head, chance)})


def append(log: RunLog, body: Body) -> Entry:
    entry = log.append(lambda _: body, attempt="a")
    assert entry is not None
    return entry
