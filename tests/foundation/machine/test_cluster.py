"""TF_CONFIG, read without TensorFlow."""

import json
from typing import Any

import pytest

from tasks.foundation.contracts.placement import AcceleratorSpec
from tasks.foundation.errors import AcceleratorError
from tasks.foundation.machine.cluster import Cluster, cluster_of, is_chief


def environment(cluster: Any, kind: Any = "worker", index: Any = 0) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_chief_comes_first() -> None:
    jobs = {"worker": ["b:1", "c:1"], "chief": ["a:1"]}
    assert cluster_of(environment(jobs, "chief")) == Cluster(("a:1", "b:1", "c:1"), 0)
    assert cluster_of(environment(jobs, "worker", 1)) == Cluster(("a:1", "b:1", "c:1"), 2)
    assert cluster_of(environment({"worker": ["a:1", "b:1"]}, index="1")) == Cluster(("a:1", "b:1"), 1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, r"needs TF_CONFIG in the environment; set it to \{\"cluster\""),
        ({"TF_CONFIG": ""}, "needs TF_CONFIG"),
        ({"TF_CONFIG": "{"}, "cannot be read"),
        ({"TF_CONFIG": "[]"}, "cannot be read"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "cannot be read .KeyError"),
        (environment({"worker": 3}), "cannot be read"),
        (environment({"worker": ["a:1"], "ps": ["b:1"]}), "has jobs ps; use only workers"),
        (environment({"worker": ["a:1"], "chief": ["b:1", "c:1"]}), "has 2 chiefs"),
        (environment({"worker": ["a:1"]}, index=1), "makes this process worker 1, but lists 1 of that type"),
        (environment({"worker": ["a:1"]}, index=-1), "makes this process worker -1"),
        (environment({"worker": ["a:1"]}, "chief"), "makes this process chief 0, but lists 0"),
        (environment({"worker": ["a:1", "a:1"]}), "names an address twice: a:1, a:1"),
    ],
)
def test_invalid_cluster_is_refused(given: dict[str, str], words: str) -> None:
    with pytest.raises(AcceleratorError, match=words) as refused:
        cluster_of(given)
    assert refused.value.exit_code == 2


def test_single_process_is_the_chief() -> None:
    assert is_chief(AcceleratorSpec(kind="cpu"), {})
    jobs = {"worker": ["a:1", "b:1"]}
    spec = AcceleratorSpec(kind="multi_worker")
    assert [is_chief(spec, environment(jobs, index=index)) for index in (0, 1)] == [True, False]
