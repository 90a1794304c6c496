"""Checkpoints that are kept for good leave the head, and are found in the history, whatever happens near them."""

from collections.abc import Sequence

import pytest

from baton.tasks.foundation.checkpoint.fork import fork
from baton.tasks.foundation.checkpoint.retention import (
    KeepBestEvaluated,
    KeepBorders,
    KeepEvery,
    KeepLast,
    RetentionPolicy,
    apply_retention,
    quarantine_damaged_tips,
)
from baton.tasks.foundation.checkpoint.selection import select_checkpoint
from baton.tasks.foundation.contracts.log_entry import Commit, Quarantine, Retire
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import BlowUp, InvalidInput, NonFinite, NothingToRestore
from baton.tasks.foundation.log import files
from baton.tasks.foundation.log.appends import commit, rewind
from baton.tasks.foundation.log.history import history_of, kept_for_good, restorable
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.memory import MemoryStorage
from baton.tasks.foundation.telemetry.events import Silent
from tests.support.counting_storage import Counting
from tests.support.lab import spec_of
from tests.support.small_logs import (
    assert_sound,
    begin,
    committing,
    evaluation,
    folders,
    head_of,
    log_numbers,
    stage,
    train,
)

POLICIES: list[RetentionPolicy] = [KeepLast(1), KeepEvery(20), KeepBestEvaluated()]
REWINDING: RunSpec = spec_of("plain", train__on_blowup="rewind", train__rewind_tries=9)


def train_to(log: RunLog, *steps: int, policies: Sequence[RetentionPolicy] = POLICIES) -> None:
    for step in steps:
        train(log, step, attempt=f"a{step}")
        apply_retention(log, policies, attempt="keeper")


def steps(store: Storage) -> tuple[list[int], list[int]]:
    """What the head has, and what is kept for good."""
    log = RunLog(store)
    head = head_of(log)
    kept = [each.ref.step for each in kept_for_good(log, head)]
    assert len(kept) == head.kept_for_good
    return [ref.step for ref in head.retained], kept


def damage(store: Storage, *steps: int) -> None:
    for folder in folders(store):
        if int(folder.split("/")[1].split("-")[0]) in steps:
            store.write(f"{folder}/ckpt.data", b"flipped")


def look(store: Storage) -> list[int]:
    """Quarantine damaged tips as a start does; return the steps of the head."""
    head = quarantine_damaged_tips(RunLog(store), attempt="doctor", telemetry=Silent(), verify_bytes=True)
    assert head is not None
    return [ref.step for ref in head.retained]


def test_they_leave_the_head_and_stay(store: Storage) -> None:
    train_to(begin(store), 10, 20, 30, 40, 50)
    assert steps(store) == ([50], [0, 20, 40])
    train_to(RunLog(store), 60, 70, 80, 90)  # another process, whose sweep finds their folders
    assert steps(store) == ([90], [0, 20, 40, 60, 80])
    log = RunLog(store)
    assert {ref.path for ref in restorable(log, head_of(log))} <= folders(store)
    assert [ref.step for ref in restorable(log, head_of(log))] == [0, 20, 40, 60, 80, 90]
    assert [each.ref.step for each in history_of(log.entries()).kept] == [0, 20, 40, 60, 80]
    assert_sound(store)


def test_the_head_does_not_grow(memory: MemoryStorage) -> None:
    train_to(begin(memory), *range(20, 1000, 20))
    sizes = [len(memory.read(f"log/{number:08d}.json")) for number in log_numbers(memory)]
    assert max(sizes[-20:]) <= max(sizes[:20]) + 64
    assert len(steps(memory)[1]) == 49


def test_a_run_without_them_reads_no_history(memory: MemoryStorage) -> None:
    policies = [KeepLast(1)]
    train_to(begin(memory), 10, 20, 30, policies=policies)
    counted = Counting(memory)
    train_to(RunLog(counted), 40, policies=policies)
    assert counted.calls["read"] <= 4, "HINT, the newest entry, the one of the identity, and the next"


def test_the_best_stays_in_the_head(store: Storage) -> None:
    log = begin(store)
    train_to(log, 20)
    best = head_of(log).retained[-1]
    log.append(lambda _: evaluation(best, accuracy=0.9), attempt="a")
    train_to(log, 30, 40, 50)
    assert steps(store) == ([20, 50], [0, 40])
    log.append(lambda head: evaluation(head.retained[-1], accuracy=0.95), attempt="a")  # type: ignore[union-attr]
    apply_retention(log, POLICIES, attempt="keeper")
    assert steps(store) == ([50], [0, 20, 40])
    log.append(lambda _: evaluation(best, accuracy=0.99), attempt="a")  # late, and it is no longer compared
    assert head_of(log).best is not None
    assert head_of(log).best.checkpoint.step == 50  # type: ignore[union-attr]


@pytest.mark.parametrize("step", [0, 20])
def test_they_are_selected_and_forked(store: Storage, step: int) -> None:
    home = store.at("old")
    train_to(begin(home), 10, 20, 30, 40, 50)
    assert select_checkpoint(home, step, error=InvalidInput).step == step
    made = fork(store, "old", "new", at_step=step, attempt="f" * 32)
    assert made.lineage.step == step
    assert [ref.step for ref in made.head.retained] == [step]
    with pytest.raises(InvalidInput, match=r"it has: 0, 20, 40, 50$"):
        select_checkpoint(home, 30, error=InvalidInput)
    with pytest.raises(InvalidInput, match="it retains steps 0, 20, 40, 50"):
        fork(store, "old", "other", at_step=30, attempt="f" * 32)


def test_policy_that_is_removed_or_changed_deletes_none(store: Storage) -> None:
    train_to(begin(store), 10, 20, 30, 40, 50)
    train_to(RunLog(store), 60, 70, policies=[KeepLast(1)])
    assert steps(store) == ([70], [0, 20, 40])
    train_to(RunLog(store), 75, 80, 85, policies=[KeepLast(1), KeepEvery(75)])
    assert steps(store) == ([85], [0, 20, 40, 75])
    train_to(RunLog(store), 90, policies=[KeepLast(1)])
    log = RunLog(store)
    assert {ref.path for ref in restorable(log, head_of(log))} <= folders(store)


def interval(log: RunLog, step: int) -> None:
    """Commit within a segment."""
    head = head_of(log)
    staged = stage(log.home, step, head.base, f"a{step}")
    body = committing(staged, parent=head.tip.path if head.tip else None)
    commit(log, body.model_copy(update={"exit_reason": "interval"}))


def test_a_rewind_never_drops_one_that_has_left(store: Storage) -> None:
    policies: list[RetentionPolicy] = [KeepLast(1), KeepEvery(20), KeepBorders()]
    log = begin(store)
    train_to(log, 10, 15, policies=policies)  # borders
    for step in (20, 25, 30):
        interval(log, step)
        apply_retention(log, policies, attempt="keeper")
    assert steps(store) == ([10, 15, 20, 30], [0]), "a rewind to 10 or 15 would drop 20"
    train_to(log, 35, 40, policies=policies)
    assert steps(store) == ([35, 40], [0, 20])
    log.append(lambda head: evaluation(head.retained[0], accuracy=0.9), attempt="a")  # type: ignore[union-attr]
    train_to(log, 45, 50, 55, policies=[*policies, KeepBestEvaluated()])
    assert steps(store) == ([35, 50, 55], [0, 20, 40])
    assert [path[12:20] for path in head_of(log).borders] == ["00000050", "00000055"], "none goes back behind 40"
    fault = NonFinite("NaN", step=57)
    for back_to in (55, 50):
        assert rewind(log, fault, base=head_of(log).base, spec=REWINDING, attempt="r").head.tip.step == back_to  # type: ignore[union-attr]
    rewind(log, fault, base=head_of(log).base, spec=REWINDING, attempt="r")
    with pytest.raises(BlowUp, match="no checkpoint on a segment border before it is retained"):
        rewind(log, NonFinite("NaN", step=42), base=head_of(log).base, spec=REWINDING, attempt="r")
    assert steps(store) == ([35, 50], [0, 20, 40])
    train_to(RunLog(store), 60, 65, policies=policies)
    kept = RunLog(store)
    assert {ref.path for ref in restorable(kept, head_of(kept))} <= folders(store)


def test_one_is_adopted_when_the_head_is_damaged(store: Storage) -> None:
    train_to(begin(store), 10, 20, 30, 40, 50)
    damage(store, 50)
    assert look(store) == [40]
    assert steps(store) == ([40], [0, 20])
    log = RunLog(store)
    body = log.entry(head_of(log).number).body
    assert isinstance(body, Quarantine)
    assert body.adopted is not None
    assert body.adopted.border, "with its flags"
    train_to(log, 45, 55)
    assert steps(store) == ([55], [0, 20, 40])
    assert [commit.checkpoint.step for entry in history_of(log.entries()).commits if isinstance(commit := entry.body, Commit)] == [0, 10, 20, 30, 40, 45, 55]  # fmt: skip  # noqa: E501
    assert_sound(store)


def test_the_newest_whole_one_is_adopted(store: Storage) -> None:
    log = begin(store)
    train_to(log, 20)
    log.append(lambda head: evaluation(head.retained[-1], accuracy=0.9), attempt="a")  # type: ignore[union-attr]
    train_to(log, 30, 40, 50, 60, 70)
    assert steps(store) == ([20, 70], [0, 40, 60])
    damage(store, 60, 70)
    assert look(store) == [20, 40], "it is newer than the best, which the head has"
    damage(store, 40)
    assert look(store) == [20]
    damage(store, 20)
    assert look(store) == [0]
    train_to(RunLog(store), 15, 25)
    assert_sound(store)


def test_none_is_quarantined_if_all_are_damaged(store: Storage) -> None:
    train_to(begin(store), 10, 20, 30)
    damage(store, 0, 20, 30)
    before = log_numbers(store)
    with pytest.raises(NothingToRestore, match=r"every retained checkpoint is damaged: .*00000000.*00000020.*00000030"):
        look(store)
    assert log_numbers(store) == before


def test_they_are_found_in_blocks_of_a_long_history(memory: MemoryStorage) -> None:
    train_to(begin(memory), *range(20, 2600, 20))
    assert head_of(RunLog(memory)).number > files.BLOCK_ENTRIES
    train_to(RunLog(memory), 2600)  # another process, whose sweep reads the history
    assert memory.exists("log/blocks/00000000.json")
    expected = steps(memory)
    counted = Counting(memory)
    log = RunLog(counted)
    assert [each.ref.step for each in kept_for_good(log, head_of(log))] == expected[1]
    assert counted.calls["read"] < files.BLOCK_ENTRIES


def test_an_entry_says_which_leave(store: Storage) -> None:
    log = begin(store)
    train_to(log, 10)
    body = log.entry(head_of(log).number).body
    assert isinstance(body, Retire)
    assert [(each.ref.step, each.border) for each in body.kept] == [(0, True)]
