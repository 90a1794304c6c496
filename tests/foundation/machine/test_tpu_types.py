"""TPU types against figures from Google's documentation."""

import pytest

from baton.tasks.foundation.errors import AcceleratorError
from baton.tasks.foundation.machine.tpu import TPU_TYPES, tpu_type


@pytest.mark.parametrize(
    ("name", "chips", "replicas", "hosts", "gigabytes"),
    [
        ("v2-8", 4, 8, 1, 8),
        ("v3-8", 4, 8, 1, 16),
        ("v3-32", 16, 32, 4, 16),
        ("v4-8", 4, 4, 1, 32),
        ("v4-16", 8, 8, 2, 32),
        ("v5litepod-1", 1, 1, 1, 16),
        ("v5litepod-4", 4, 4, 1, 16),
        ("v5litepod-8", 8, 8, 1, 16),
        ("v5litepod-16", 16, 16, 4, 16),
        ("v5p-8", 4, 4, 1, 95),
        ("v5p-16", 8, 8, 2, 95),
        ("v6e-1", 1, 1, 1, 32),
        ("v6e-8", 8, 8, 1, 32),
        ("v6e-256", 256, 256, 64, 32),
    ],
)
def test_types_have_the_documented_sizes(name: str, chips: int, replicas: int, hosts: int, gigabytes: int) -> None:
    found = tpu_type(name)
    assert (found.chips, found.replicas, found.hosts) == (chips, replicas, hosts)
    assert found.hbm_bytes == gigabytes * 10**9


def test_names_ignore_case_and_spaces() -> None:
    assert tpu_type(" V5LitePod-8 ") is TPU_TYPES["v5litepod-8"]
    assert all(name == each.name for name, each in TPU_TYPES.items())


@pytest.mark.parametrize(
    ("name", "near"), [("v5litepod-9", "v5litepod-8"), ("v5e-8", "v"), ("v6-8", "v6e-8"), ("nonsense", "v5litepod-8")]
)
def test_unknown_type_is_refused_with_similar_names(name: str, near: str) -> None:
    with pytest.raises(AcceleratorError, match=f"--for {name}: unknown TPU type; try .*{near}"):
        tpu_type(name)
