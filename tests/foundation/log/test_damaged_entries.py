"""A bit that flips in an entry, or a value that somebody changes, is found before anything is believed."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from baton.tasks.foundation.contracts.log_entry import Body, Entry, Finish, Quarantine, Retire, Rewind
from baton.tasks.foundation.errors import RunLogError
from baton.tasks.foundation.log.files import entry_path
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.memory import MemoryStorage
from tests.support.random_logs import append, next_commit
from tests.support.small_logs import (
    assert_sound,
    begin,
    change_of_seed,
    evaluation,
    head_of,
    log_numbers,
    on_test,
    origin,
    train,
)


def with_every_kind(home: Storage) -> Entry:
    """A log whose newest head has something in all of its keys; returns the newest entry."""
    log = begin(home)
    log.note_read(head_of(log).retained[-1].path)
    for step in (10, 20, 30, 40):
        train(log, step)
    kept = head_of(log).retained
    append(log, Quarantine(path=kept[1].path, reason="damaged"))
    append(log, Rewind(to=kept[-2], blown_up_at=35, reason="NaN", skip_batches=3))
    train(log, 35)
    append(log, Retire(paths=(kept[0].path,), deleted=()))
    tip = head_of(log).retained[-1]
    append(log, evaluation(tip, accuracy=0.5))
    append(log, on_test(tip, accuracy=0.25))
    return append(log, Finish(checkpoint=tip, reason="EarlyStopping"))


def facts_of(home: Storage) -> str:
    newest = RunLog(home).newest()
    assert newest is not None
    return repr(newest)


def refusal(home: Storage) -> str | None:
    """The error of reading the newest entry; None if it can be read."""
    try:
        RunLog(home).head()
    except RunLogError as fault:
        return str(fault)
    return None


def is_refused(home: Storage, number: int, sound: str, what: str) -> bool:
    """Whether the newest entry is refused, by name and with a remedy; if it is not, it says what the sound one does."""
    refused = refusal(home)
    if refused is None:
        assert facts_of(home) == sound, what
        return False
    with pytest.raises(RunLogError):  # a list does not believe it either
        RunLog(home).newest_stored()
    for words in (entry_path(number), "hint: restore", f"move {entry_path(number)} out of"):
        assert words in refused, what
    return True


def test_any_flipped_bit_of_the_newest_entry_is_refused(memory: MemoryStorage) -> None:
    number = with_every_kind(memory).number
    path, refused = entry_path(number), 0
    data, sound, chance = memory.read(path), facts_of(memory), random.Random(0)
    for at in range(len(data)):
        changed = bytes([data[at] ^ 1 << chance.randrange(8)])
        memory.write(path, data[:at] + changed + data[at + 1 :])
        refused += is_refused(memory, number, sound, f"byte {at}: {data[at : at + 1]!r} to {changed!r}")
    assert refused >= len(data) - len('"sha256"'), "only the name of the digest's key may change"


def changed_values(value: Any) -> Iterator[Any]:
    """The same JSON with one value or one key changed, for each value and each key in it."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from ({**value, key: other} for other in changed_values(below))
            yield {(f"{key}_" if name == key else name): kept for name, kept in value.items()}
            yield {name: kept for name, kept in value.items() if name != key}
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from ([*value[:index], other, *value[index + 1 :]] for other in changed_values(below))
            yield [*value[:index], *value[index + 1 :]]
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, -1 - value, str(value))
    elif isinstance(value, str):
        yield from (f"{value[:-1]}{'e' if value[-1:] == 'd' else 'd'}", "", 7)
    else:
        yield from (0, "x")


def test_any_changed_value_of_the_newest_entry_is_refused(memory: MemoryStorage) -> None:
    number = with_every_kind(memory).number
    path = entry_path(number)
    entry, sound = json.loads(memory.read(path)), facts_of(memory)
    changes = list(changed_values(entry))
    assert len(changes) > 200
    for changed in changes:
        memory.write(path, json.dumps(changed, separators=(",", ":")).encode())
        assert is_refused(memory, number, sound, json.dumps(changed))


def bodies(home: Storage) -> Iterator[Body | None]:
    """The newest entry of each kind; None: a commit, which needs files."""
    log = begin(home)
    train(log, 10)
    train(log, 20)
    head = head_of(log)
    tip, before = head.retained[-1], head.retained[-2]
    yield None
    yield evaluation(tip, accuracy=0.75)
    yield on_test(tip, accuracy=0.75)
    yield Retire(paths=(before.path,), deleted=())
    yield Quarantine(path=tip.path, reason="damaged")
    yield Rewind(to=before, blown_up_at=15, reason="NaN", skip_batches=2)
    yield Finish(checkpoint=tip, reason="EarlyStopping")
    change = change_of_seed(head)
    assert change is not None
    yield change


def test_moving_a_damaged_entry_away_goes_on_from_the_one_before(store: Storage) -> None:
    for number, body in enumerate(bodies(store)):
        log, before = RunLog(store), head_of(RunLog(store))
        damaged = train(log, 30, attempt=f"a{number}") if body is None else append(log, body)
        path = entry_path(damaged.number)
        data = store.read(path)
        store.write(path, data.replace(b'"base":', b'"bace":', 1))
        with pytest.raises(RunLogError, match=rf"move {path} out of .*/log: only this entry is lost") as fault:
            train(RunLog(store), 30)
        assert f"the run continues from entry {before.number}" in str(fault.value)
        store.write("log/damaged", store.read(path))
        store.delete(path)
        assert repr(head_of(RunLog(store))) == repr(before)
        again = train(RunLog(store), 30, attempt=f"b{number}")
        assert again.number == before.number + 1
        assert_sound(store)
        store.delete(path)


def test_the_first_entry_of_a_run_without_commits_can_be_begun_again(memory: MemoryStorage) -> None:
    append(RunLog(memory), origin())
    memory.write(entry_path(0), memory.read(entry_path(0)).replace(b'"replicas":1', b'"replicas":3'))
    with pytest.raises(
        RunLogError, match=r"log/00000000\.json is damaged.*\n.*\nhint: .* move .* away and start the run"
    ):
        RunLog(memory).head()


def test_an_entry_of_another_writer_is_looked_at_before_it_is_followed(memory: MemoryStorage) -> None:
    """A process that has the log in memory reads only the new entries; each of them is compared."""
    log = begin(memory)
    train(RunLog(memory), 10)
    path = entry_path(2)
    data = memory.read(path)
    for entry in (data.replace(b'"commits":2', b'"commits":3'), data[: data.rindex(b',"sha256"')] + b"}"):
        memory.write(path, entry.replace(b'"commits":2', b'"commits":3'))
        for _ in range(2):
            with pytest.raises(RunLogError, match=path):
                log.head()
    memory.write(path, data)
    assert head_of(log).number == 2


def test_a_rewind_to_what_is_not_retained_is_no_state(memory: MemoryStorage) -> None:
    log = begin(memory)
    gone = next_commit(head_of(log), random.Random(0)).checkpoint
    with pytest.raises(RunLogError, match=f"a rewind goes back to {gone.path}, which is not retained"):
        append(log, Rewind(to=gone, blown_up_at=5, reason="NaN", skip_batches=1))
    assert log_numbers(memory) == [0, 1]
