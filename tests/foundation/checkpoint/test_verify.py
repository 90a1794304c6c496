"""Two independent reads must agree on damage; each kind is found. See also test_quarantine.py."""

import pytest

from baton.tasks.foundation.checkpoint.verify import find_damage
from baton.tasks.foundation.errors import FileMissing
from baton.tasks.foundation.storage.interface import Storage
from tests.support.counting_storage import Counting
from tests.support.small_logs import begin, head_of


@pytest.mark.parametrize("first", [b"", None], ids=["other bytes", "not there"])
def test_one_bad_read_is_not_damage(store: Storage, first: bytes | None) -> None:
    log = begin(store)
    flaky = Counting(store)
    answers = iter([first])

    class OneBadRead:
        def __getattr__(self, verb: str) -> object:
            return getattr(flaky, verb)

        def read(self, path: str) -> bytes:
            bad = next(answers, "none") if path.endswith("manifest.json") else "none"
            if bad is None:
                raise FileMissing(path)
            return flaky.read(path) if isinstance(bad, str) else bad

    tip = head_of(log).tip
    assert tip is not None
    assert find_damage(OneBadRead(), tip) is None  # type: ignore[arg-type]
    assert next(answers, "used up") == "used up"
