"""Files of numbered records."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.tfrecords import file_of, record


@pytest.fixture
def files(workshop: Any) -> Callable[..., dict[str, bytes]]:
    """Write files with the given numbers of records, numbered throughout, into the folder `records`."""

    def make(*counts: int, write: bool = True) -> dict[str, bytes]:
        made, number = {}, 0
        for index, count in enumerate(counts):
            made[f"part-{index}"] = file_of([record(each) for each in range(number, number + count)], workshop.code)
            number += count
        for name, data in made.items():
            if write:
                workshop.write(f"records/{name}", data)
        return made

    return make
