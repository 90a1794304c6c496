"""Kubernetes and JobSet accept the JobSets of deploy/, and they do with each end of Baton what the end means.

No light package has JobSet's own schema, so `SCHEMA` has the fields of v1alpha2 that concern manifests like these.
"""

import copy
import math
import re
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from baton.flows.commands.main import VERBS
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.errors import AcceleratorLost, BatonError, InvalidInput, RunLogError, StageLost
from baton.tasks.foundation.machine.cluster import cluster_of
from baton.tasks.foundation.machine.tpu import tpu_type
from tests.deploy.rendering import JobOfJobSet, documents
from tests.support.checkout import CHECKOUT

GPUS, SLICE = "jobset.yaml", "tpu-slice.yaml"
JOBS = [(GPUS, "worker"), (SLICE, "server"), (SLICE, "client")]
DNS_LABEL = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
NAMES = {"type": "array", "items": {"type": "string"}}
KILLED = 128 + 9
REASONS = ["BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy"]


def fields(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """An object that has no other fields."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


ACTIONS = [
    "FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob", "RestartJobAndIgnoreMaxRestarts"
]  # fmt: skip
RULE = fields(
    ("name", "action"),
    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$", "maxLength": 128},
    action={"enum": ACTIONS},
    onJobFailureReasons={"type": "array", "items": {"enum": REASONS}, "uniqueItems": True},
    onJobFailureMessagePatterns={**NAMES, "uniqueItems": True},
    targetReplicatedJobs=NAMES,
)
# Unlike Kubernetes, JobSet has no default for the status of a condition.
CONDITION = fields(("status", "type"), status={"enum": ["True", "False", "Unknown"]}, type={"type": "string"})
POD_RULE = {"properties": {"onPodConditions": {"type": "array", "items": CONDITION}}}
POD_FAILURE_POLICY = {"properties": {"rules": {"type": "array", "items": POD_RULE}}}
JOB_SPEC = {"type": "object", "properties": {"podFailurePolicy": POD_FAILURE_POLICY}}  # the rest is of batch/v1
REPLICATED_JOB = fields(
    ("name", "template"),
    name={"type": "string", "pattern": DNS_LABEL},
    groupName={"type": "string", "pattern": DNS_LABEL},
    replicas={"type": "integer", "minimum": 0},
    template=fields(("spec",), metadata={"type": "object"}, spec=JOB_SPEC),
    dependsOn={"type": "array", "maxItems": 5},
)
SCHEMA = fields(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=fields(
        ("name",),
        name={"type": "string", "pattern": DNS_LABEL},
        namespace={"type": "string", "pattern": DNS_LABEL},
        labels={"type": "object"},
        annotations={"type": "object"},
    ),
    spec=fields(
        ("replicatedJobs",),
        replicatedJobs={"type": "array", "items": REPLICATED_JOB, "minItems": 1},
        network=fields(
            enableDNSHostnames={"type": "boolean"},
            subdomain={"type": "string", "pattern": DNS_LABEL, "maxLength": 63},
            publishNotReadyAddresses={"type": "boolean"},
        ),
        successPolicy=fields(("operator",), operator={"enum": ["All", "Any"]}, targetReplicatedJobs=NAMES),
        failurePolicy=fields(
            maxRestarts={"type": "integer", "minimum": 0},
            restartStrategy={"enum": ["Recreate", "BlockingRecreate", "InPlaceRestart"]},
            rules={"type": "array", "items": RULE},
        ),
        startupPolicy=fields(("startupPolicyOrder",), startupPolicyOrder={"enum": ["AnyOrder", "InOrder"]}),
        suspend={"type": "boolean"},
        coordinator=fields(
            ("replicatedJob",),
            replicatedJob={"type": "string"},
            jobIndex={"type": "integer"},
            podIndex={"type": "integer"},
        ),
        managedBy={"type": "string", "maxLength": 63},
        ttlSecondsAfterFinished={"type": "integer", "minimum": 0},
        volumeClaimPolicies={"type": "array", "maxItems": 50},
    ),
)


@pytest.fixture
def gpus() -> JobOfJobSet:
    return JobOfJobSet(GPUS, "worker")


@pytest.fixture
def server() -> JobOfJobSet:
    return JobOfJobSet(SLICE, "server")


@pytest.fixture
def client() -> JobOfJobSet:
    return JobOfJobSet(SLICE, "client")


def refuse_unknown(jobset: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(jobset)


@pytest.mark.parametrize(("file", "name"), JOBS)
def test_every_document_is_valid(file: str, name: str) -> None:
    (priority,), job = documents("priority-class.yaml"), JobOfJobSet(file, name)
    for each in (priority, job.manifest):
        kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
    refuse_unknown(job.jobset)
    # The name of a pod has five more characters.
    assert len(f"{job.manifest['metadata']['name']}-{job.pods - 1}-abcde") <= 63
    for rule in job.jobset["spec"].get("failurePolicy", {"rules": []})["rules"]:
        assert [re.compile(pattern) for pattern in rule["onJobFailureMessagePatterns"]]
    assert job.spec["parallelism"] == job.pods
    assert job.pod["priorityClassName"] == priority["metadata"]["name"]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("spec", "network", "enableDNSHostname"), True),
        (("spec", "failurePolicy", "rules", 0, "action"), "FailJob"),
        (("spec", "failurePolicy", "rules", 0, "name"), "work-left"),
        (("spec", "replicatedJobs", 0, "parallelism"), 3),
        (
            ("spec", "replicatedJobs", 0, "template", "spec", "podFailurePolicy", "rules", 2, "onPodConditions", 0),
            {"type": "DisruptionTarget"},
        ),
    ],
)
def test_invalid_jobset_is_refused(gpus: JobOfJobSet, place: tuple[Any, ...], value: Any) -> None:
    changed = copy.deepcopy(gpus.jobset)
    below: Any = changed
    for key in place[:-1]:
        below = below[key]
    below[place[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        refuse_unknown(changed)


def test_hosts_are_the_pods_of_the_jobset(gpus: JobOfJobSet) -> None:
    clusters = [cluster_of(gpus.environment(index)) for index in range(gpus.pods)]
    assert {cluster.addresses for cluster in clusters} == {tuple(gpus.addresses())}
    assert [cluster.host for cluster in clusters] == list(range(gpus.pods))


@pytest.mark.parametrize(("file", "name", "kind"), [(GPUS, "worker", "multi_worker"), (SLICE, "client", "tpu")])
def test_the_command_is_valid(file: str, name: str, kind: str) -> None:
    job = JobOfJobSet(file, name)
    spec = load_run_file(CHECKOUT / "deploy" / "runs" / "text" / "run.yaml", job.settings()).spec
    assert spec.accelerator.kind == kind
    assert spec.storage == "gs://BUCKET/runs"
    notice = 15 if "nodeSelector" in job.pod else math.inf  # of spot nodes
    assert spec.stop.grace_seconds < min(notice, job.pod["terminationGracePeriodSeconds"])


def test_each_end_of_a_host_is_acted_on(gpus: JobOfJobSet) -> None:
    ends: dict[type[BatonError], str] = {
        InvalidInput: "FailJobSet",
        RunLogError: "FailJobSet",
        AcceleratorLost: "RestartJobSetAndIgnoreMaxRestarts",
        StageLost: "RestartJobSetAndIgnoreMaxRestarts",
        BatonError: "RestartJobSet",
    }
    for error, action in ends.items():
        assert gpus.what_follows(error.exit_code) == action, error.__name__
    assert gpus.what_follows(KILLED) == "RestartJobSet"
    assert gpus.what_follows(KILLED, disrupted=True) == "a new pod"
    assert gpus.what_follows(AcceleratorLost.exit_code, disrupted=True) == "RestartJobSetAndIgnoreMaxRestarts"
    assert gpus.jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    assert gpus.pod["restartPolicy"] == "Never"  # a condition of pod failure policies


def test_slice_is_driven_at_the_addresses_of_its_servers(server: JobOfJobSet, client: JobOfJobSet) -> None:
    servers = [f"grpc://{address}" for address in server.addresses()]
    assert f"accelerator.tpu={','.join(servers)}" in client.settings()
    assert "accelerator.connect_seconds=86400" in client.settings()
    assert server.container["args"] == ["baton", "slice-server"]
    assert "slice-server" in VERBS
    assert server.container["image"] == client.container["image"]


def test_slice_replaces_only_what_has_died(server: JobOfJobSet, client: JobOfJobSet) -> None:
    crash, many = BatonError.exit_code, 1000
    assert {server.what_follows(code, crashes=many) for code in (crash, 2, 3, 4, KILLED)} == {"the same pod"}
    assert server.what_follows(KILLED, crashes=many, disrupted=True) == "a new pod"
    assert server.spec["podReplacementPolicy"] == "Failed"

    limit = client.spec["backoffLimit"]
    for error in (InvalidInput, RunLogError):
        assert client.what_follows(error.exit_code) == "FailJobSet"
    for error in (AcceleratorLost, StageLost):
        assert client.what_follows(error.exit_code, crashes=limit) == "a new pod"
    assert client.what_follows(KILLED, crashes=limit, disrupted=True) == "a new pod"
    assert client.what_follows(crash, crashes=limit - 1) == "a new pod"
    assert client.what_follows(crash, crashes=limit) == "FailJobSet"
    assert client.pod["restartPolicy"] == "Never"
    assert client.jobset["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["client"]}


def test_servers_have_all_chips_of_one_slice(server: JobOfJobSet, client: JobOfJobSet) -> None:
    topology = server.pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    chips, resources = math.prod(map(int, topology.split("x"))), server.container["resources"]
    known = tpu_type(f"v5litepod-{chips}")
    for kind in ("requests", "limits"):
        assert server.pods * int(resources[kind]["google.com/tpu"]) == known.chips
    assert server.pods == known.hosts
    # A first pod that has failed would keep JobSet from admitting another one on the slice.
    assert "exclusive-topology" not in str(server.jobset)
    assert {f"cloud.google.com/gke-{name}" for name in ("nodepool", "spot", "tpu-accelerator", "tpu-topology")} == set(
        server.pod["nodeSelector"]
    )
    assert {each["key"] for each in server.pod["tolerations"]} == {"cloud.google.com/gke-spot", "google.com/tpu"}
    assert "google.com/tpu" not in str(client.manifest)


def test_pods_get_gpus_of_spot_nodes(gpus: JobOfJobSet) -> None:
    resources = gpus.container["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == "1"
    assert {"cloud.google.com/gke-accelerator", "cloud.google.com/gke-spot"} == set(gpus.pod["nodeSelector"])
    tolerated = {each["key"] for each in gpus.pod["tolerations"]}
    assert tolerated == {"cloud.google.com/gke-spot", "nvidia.com/gpu"}
    (volume,), (mount,) = gpus.pod["volumes"], gpus.container["volumeMounts"]
    assert (volume["emptyDir"]["medium"], mount["mountPath"]) == ("Memory", "/dev/shm")  # noqa: S108
    assert volume["name"] == mount["name"]
    assert all("ephemeral-storage" in resources[kind] for kind in ("requests", "limits"))
