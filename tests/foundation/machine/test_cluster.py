"""The hosts of a run from the environments of schedulers, read without TensorFlow."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from baton.flows.commands.main import main
from baton.tasks.foundation.contracts.placement import AcceleratorSpec
from baton.tasks.foundation.errors import AcceleratorError
from baton.tasks.foundation.machine import tpu
from baton.tasks.foundation.machine.cluster import Cluster, cluster_of, host_names, is_chief


def environment(cluster: Any, kind: Any = "worker", index: Any = 0) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_chief_comes_first() -> None:
    jobs = {"worker": ["b:1", "c:1"], "chief": ["a:1"]}
    assert cluster_of(environment(jobs, "chief")) == Cluster(("a:1", "b:1", "c:1"), 0)
    assert cluster_of(environment(jobs, "worker", 1)) == Cluster(("a:1", "b:1", "c:1"), 2)
    assert cluster_of(environment({"worker": ["a:1", "b:1"]}, index="1")) == Cluster(("a:1", "b:1"), 1)


# Of `sbatch --nodes=4 --ntasks-per-node=1`, within `srun`.
SLURM = {
    "SLURM_JOB_NODELIST": "gpu[08-10],login",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_STEP_NODELIST": "gpu[08-10],login",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "2",
}
ON_SLURM = ("gpu08:2222", "gpu09:2222", "gpu10:2222", "login:2222")
OUTSIDE_OF_STEPS = {name: value for name, value in SLURM.items() if "STEP" not in name}
SKYPILOT = {"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5\n", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"}
ON_SKYPILOT = ("10.0.0.4:2222", "10.0.0.5:2222")
JOBSET = {
    "BATON_HOSTS": "digits-worker-0-[0-1].digits",
    "JOB_COMPLETION_INDEX": "1",
    "JOBSET_NAME": "digits",
    "REPLICATED_JOB_NAME": "worker",
}
ON_JOBSET = ("digits-worker-0-0.digits:2222", "digits-worker-0-1.digits:2222")
# As Vertex AI documents it; TF_CONFIG has the same addresses as jobs `chief` and `worker`.
POOLS = {"workerpool0": ["job-workerpool0-ab-0:2222"], "workerpool1": ["job-workerpool1-ab-0:2222"]}


def vertex(kind: str = "workerpool1", index: int = 0, **more: list[str]) -> dict[str, str]:
    task = {"type": kind, "index": index, "trial": ""}
    return {"CLUSTER_SPEC": json.dumps({"cluster": {**POOLS, **more}, "environment": "cloud", "task": task})}


@pytest.mark.parametrize(
    ("given", "addresses", "host", "source"),
    [
        (SLURM, ON_SLURM, 2, "SLURM_STEP_NODELIST"),
        (OUTSIDE_OF_STEPS | {"SLURM_NODEID": "0"}, ON_SLURM, 0, "SLURM_JOB_NODELIST"),
        # `srun --nodes=1 --nodelist=login`: a step counts its own nodes, and the job has more of them.
        (
            SLURM | {"SLURM_STEP_NODELIST": "login", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"},
            ("login:2222",),
            0,
            "SLURM_STEP_NODELIST",
        ),
        (JOBSET, ON_JOBSET, 1, "BATON_HOSTS"),
        (SLURM | {"BATON_HOSTS": "a:2300, b,c"}, ("a:2300", "b:2222", "c:2222"), 2, "BATON_HOSTS"),
        (SKYPILOT, ON_SKYPILOT, 1, "SKYPILOT_NODE_IPS"),
        (SLURM | SKYPILOT, ON_SKYPILOT, 1, "SKYPILOT_NODE_IPS"),
        (vertex(), (*POOLS["workerpool0"], *POOLS["workerpool1"]), 1, "CLUSTER_SPEC"),
        (vertex("workerpool0"), (*POOLS["workerpool0"], *POOLS["workerpool1"]), 0, "CLUSTER_SPEC"),
        (environment({"worker": ["a:1"]}) | SLURM | vertex(), ("a:1",), 0, "TF_CONFIG"),
    ],
)
def test_hosts_are_those_of_the_scheduler(
    given: dict[str, str], addresses: tuple[str, ...], host: int, source: str
) -> None:
    found = cluster_of(given)
    assert found == Cluster(addresses, host)
    assert found.source == source
    assert cluster_of({"TF_CONFIG": json.dumps(found.tf_config())}) == found


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, r"needs TF_CONFIG in the environment; set it to \{\"cluster\".*deploy/hosts.md"),
        ({"TF_CONFIG": ""}, "needs TF_CONFIG"),
        ({"TF_CONFIG": "{"}, "cannot be read"),
        ({"TF_CONFIG": "[]"}, "cannot be read"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "cannot be read .KeyError"),
        (environment({"worker": 3}), "cannot be read"),
        (environment({"worker": ["a:1"], "ps": ["b:1"]}), "has jobs ps; use only worker, and at most one chief"),
        (environment({"worker": ["a:1"], "chief": ["b:1", "c:1"]}), "has 2 chiefs"),
        (environment({"worker": ["a:1"]}, index=1), "makes this process worker 1, but lists 1 of that type"),
        (environment({"worker": ["a:1"]}, index=-1), "makes this process worker -1"),
        (environment({"worker": ["a:1"]}, "chief"), "makes this process chief 0, but lists 0"),
        (environment({"worker": ["a:1", "a:1"]}), "names an address twice: a:1, a:1"),
        (vertex(workerpool2=["c:2222"], workerpool3=["d:2222"]), "CLUSTER_SPEC has jobs workerpool2, workerpool3; use"),
        (vertex(workerpool0=["a:2222", "b:2222"]), "CLUSTER_SPEC has 2 chiefs in job workerpool0"),
        ({"CLUSTER_SPEC": "?"}, r"CLUSTER_SPEC = \? cannot be read"),
        (
            SLURM | {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "2(x4)"},
            "SLURM_STEP_NUM_TASKS = 8, and SLURM_STEP_NODELIST has 4 nodes.*one process on each.*--ntasks-per-node=1",
        ),
        (OUTSIDE_OF_STEPS | {"SLURM_NTASKS": "8"}, "SLURM_NTASKS = 8, and SLURM_JOB_NODELIST has 4 nodes"),
        ({"SLURM_JOB_NODELIST": "n[1-2]"}, "names 2 hosts, and SLURM_NODEID is not set.*start the command with srun"),
        (SLURM | {"SLURM_NODEID": "4"}, "SLURM_NODEID = 4, and SLURM_STEP_NODELIST names 4 hosts; .* from 0 to 3"),
        (JOBSET | {"JOB_COMPLETION_INDEX": "x"}, "JOB_COMPLETION_INDEX = x, and BATON_HOSTS names 2 hosts"),
        ({"BATON_HOSTS": "a,b"}, "JOB_COMPLETION_INDEX or SKYPILOT_NODE_RANK or SLURM_NODEID is not set"),
        (JOBSET | {"BATON_HOSTS": "a,b,a:2222"}, "BATON_HOSTS names an address twice: a:2222, b:2222, a:2222"),
        (JOBSET | {"BATON_HOSTS": " , "}, "BATON_HOSTS =  , : no host; set it to names such as host-0,host-1"),
        (JOBSET | {"BATON_HOSTS": "n[0-3"}, "brackets do not match"),
        (JOBSET | {"BATON_HOSTS": "bgl[123x456]"}, r"\[123x456\] is not a list of numbers"),
        (JOBSET | {"BATON_HOSTS": "n[3-0]"}, "ends before it begins"),
        (JOBSET | {"BATON_HOSTS": "n[0-999999999999]"}, "more than 10000 hosts"),
        (JOBSET | {"BATON_HOSTS": "n[0-999]x[0-999]"}, "more than 10000 hosts"),
        (JOBSET | {"BATON_HOSTS": "a b;reboot"}, "'b;reboot' is not the name of a host"),
    ],
)
def test_invalid_cluster_is_refused(given: dict[str, str], words: str) -> None:
    with pytest.raises(AcceleratorError, match=words) as refused:
        cluster_of(given)
    assert refused.value.exit_code == 2


NUMBERS = st.tuples(st.integers(0, 999), st.integers(0, 12), st.integers(1, 5))


@given(
    st.lists(st.tuples(st.sampled_from(["n", "rack-", "a.b-"]), st.lists(NUMBERS, max_size=2)), min_size=1, max_size=4)
)
def test_names_are_expanded_as_slurm_writes_them(names: list[tuple[str, list[tuple[int, int, int]]]]) -> None:
    text, expected = [], []
    for stem, ranges in names:
        written = [f"{first:0{width}d}-{first + more:0{width}d}" for first, more, width in ranges]
        text.append(f"{stem}[{','.join(written)}]e" if ranges else f"{stem}e")
        expected += [
            f"{stem}{number:0{width}d}e" for first, more, width in ranges for number in range(first, first + more + 1)
        ] or [f"{stem}e"]
    assert host_names(",".join(text)) == expected


def test_several_brackets_count_the_last_one_first() -> None:
    expected = ["r1-n08:1", "r1-n09:1", "r1-n10:1", "r1-n12:1", "r3-n08:1", "r3-n09:1", "r3-n10:1", "r3-n12:1"]
    assert host_names("r[1,3]-n[08-10,12]:1") == expected


def test_hosts_prints_what_run_reads(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hosts"]) == 2
    assert "needs TF_CONFIG" in capsys.readouterr().err
    for name, value in JOBSET.items():
        monkeypatch.setenv(name, value)
    assert main(["hosts"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "host 1 of 2, from BATON_HOSTS\n"
    assert cluster_of({"TF_CONFIG": printed.out}) == Cluster(ON_JOBSET, 1)
    assert main(["hosts", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["source"], found["host"], found["addresses"]) == ("BATON_HOSTS", 1, list(ON_JOBSET))
    assert found["tf_config"] == json.loads(printed.out)


def test_single_process_is_the_chief() -> None:
    assert is_chief(AcceleratorSpec(kind="cpu"), {})
    jobs = {"worker": ["a:1", "b:1"]}
    spec = AcceleratorSpec(kind="multi_worker")
    assert [is_chief(spec, environment(jobs, index=index)) for index in (0, 1)] == [True, False]


# An address, and how it stands in what is made of it where 2222 is the port of those that name none.
ADDRESSES = {
    "host-0": "host-0:2222",
    "a.b_c.example:1": "a.b_c.example:1",
    "10.0.0.4": "10.0.0.4:2222",
    "10.0.0.4:65535": "10.0.0.4:65535",
    "fe80::1": "[fe80::1]:2222",
    "[FE80:0::1]": "[fe80::1]:2222",
    "[::1]:02223": "[::1]:2223",
    f"{'a' * 63}.b": f"{'a' * 63}.b:2222",
}
NO_ADDRESSES = [
    "a..b", "-a", "a-", "a" * 64, "a." * 126 + "bc", "a/b", "\u00fc.example", "300.0.0.1", "1", "10.0.0.4.5",
    "10.0.0.04", "a:0", "a:65536", "a:999999", "a:", "a:x", ":1", "a:1:2", "10.0.0.4:1:2", "[::1]:0", "[::1]:1:2",
    "[::1]x", "[a]:1", "[::1", "fe80::1%eth0", "1:2:3",
]  # fmt: skip
# The addresses that a process reads where each source names this one and another one.
SOURCES: dict[str, Callable[[str], tuple[str, ...]]] = {
    "accelerator.tpu": lambda each: servers_of_slice(f"grpc://{each},grpc://other"),
    "TPU_WORKER_HOSTNAMES": lambda each: servers_of_slice("slice", f"{each},other"),
    "TF_CONFIG": lambda each: cluster_of(environment({"worker": [each, "other:2222"]})).addresses,
    "CLUSTER_SPEC": lambda each: cluster_of(vertex(workerpool0=[each], workerpool1=["other:2222"])).addresses,
    "BATON_HOSTS": lambda each: cluster_of(JOBSET | {"BATON_HOSTS": f"{each},other"}).addresses,
    "SKYPILOT_NODE_IPS": lambda each: cluster_of(SKYPILOT | {"SKYPILOT_NODE_IPS": f"{each}\nother"}).addresses,
    "SLURM_STEP_NODELIST": lambda each: (
        cluster_of({"SLURM_STEP_NODELIST": f"{each},other", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}).addresses
    ),
}


def servers_of_slice(named: str, names: str = "") -> tuple[str, ...]:
    spec = AcceleratorSpec(kind="tpu", tpu=named)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_WORKER_HOSTNAMES", names)
        patch.setattr(tpu, "_no_server_at", lambda worker: found.append(worker) or "")
        found: list[str] = []
        tpu.wait_for_servers(spec, lambda _: None)
    return tuple(each.replace(":8470", ":2222") for each in found)


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_reads_the_same_addresses(source: str) -> None:
    for text, canonical in ADDRESSES.items():
        if source in {"TF_CONFIG", "CLUSTER_SPEC"} and canonical.endswith(":2222"):
            with pytest.raises(AcceleratorError, match="has no port: write host:port"):
                SOURCES[source](text)
        else:
            assert SOURCES[source](text) == (canonical, "other:2222")
    for text in NO_ADDRESSES:
        with pytest.raises((AcceleratorError, ValidationError)) as refused:
            SOURCES[source](text)
        assert (source.partition(".")[2] or source) in str(refused.value), text
        assert getattr(refused.value, "exit_code", 2) == 2
