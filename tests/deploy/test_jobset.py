"""Kubernetes and JobSet accept deploy/jobset.yaml, and it does with each end of Baton what the end means.

No light package has JobSet's own schema, so `SCHEMA` has the fields of v1alpha2 that concern a manifest like this one.
"""

import copy
import re
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.errors import AcceleratorLost, BatonError, InvalidInput, RunLogError, StageLost
from tasks.foundation.machine.cluster import cluster_of
from tests.deploy.rendering import JobSet, jobset_documents
from tests.support.checkout import CHECKOUT

HOSTS = 3
DNS_LABEL = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
NAMES = {"type": "array", "items": {"type": "string"}}
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
REPLICATED_JOB = fields(
    ("name", "template"),
    name={"type": "string", "pattern": DNS_LABEL},
    groupName={"type": "string", "pattern": DNS_LABEL},
    replicas={"type": "integer", "minimum": 0},
    template=fields(("spec",), metadata={"type": "object"}, spec={"type": "object"}),  # of batch/v1
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
def jobset() -> JobSet:
    return JobSet()


def test_every_document_is_valid(jobset: JobSet) -> None:
    newest = kubernetes_validate.latest_version()
    for each in [*(each for each in jobset_documents() if each["kind"] != "JobSet"), jobset.job]:
        kubernetes_validate.validate(each, newest, strict=True)
    jsonschema.Draft202012Validator(SCHEMA).validate(jobset.manifest)
    # The name of a pod has five more characters.
    assert len(f"{jobset.job['metadata']['name']}-{HOSTS - 1}-abcde") <= 63
    for rule in jobset.manifest["spec"]["failurePolicy"]["rules"]:
        assert [re.compile(pattern) for pattern in rule["onJobFailureMessagePatterns"]]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("spec", "network", "enableDNSHostname"), True),
        (("spec", "failurePolicy", "rules", 0, "action"), "FailJob"),
        (("spec", "failurePolicy", "rules", 0, "name"), "work-left"),
        (("spec", "replicatedJobs", 0, "parallelism"), 3),
    ],
)
def test_invalid_jobset_is_refused(jobset: JobSet, place: tuple[Any, ...], value: Any) -> None:
    changed = copy.deepcopy(jobset.manifest)
    below: Any = changed
    for key in place[:-1]:
        below = below[key]
    below[place[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(changed)


def test_hosts_are_the_pods_of_the_jobset(jobset: JobSet) -> None:
    spec, name, network = jobset.job["spec"], jobset.manifest["metadata"]["name"], jobset.manifest["spec"]["network"]
    assert (spec["completionMode"], spec["parallelism"], spec["completions"]) == ("Indexed", HOSTS, HOSTS)
    assert network["enableDNSHostnames"]
    subdomain = network.get("subdomain", name)
    (port,) = jobset.container["ports"]
    expected = tuple(f"{name}-worker-0-{index}.{subdomain}:{port['containerPort']}" for index in range(HOSTS))
    clusters = [cluster_of(jobset.environment(index)) for index in range(HOSTS)]
    assert {cluster.addresses for cluster in clusters} == {expected}
    assert [cluster.host for cluster in clusters] == list(range(HOSTS))


def test_the_command_is_valid(jobset: JobSet) -> None:
    program, verb, file, *overrides = jobset.container["args"]
    assert (program, verb, file) == ("baton", "run", "/code/run.yaml")
    settings = [each.removeprefix("--set=") for each in overrides]
    spec = load_run_file(CHECKOUT / "deploy" / "runs" / "text" / "run.yaml", settings).spec
    assert spec.accelerator.kind == "multi_worker"
    assert spec.storage == "gs://BUCKET/runs"
    assert spec.stop.grace_seconds < 15 <= jobset.pod["terminationGracePeriodSeconds"]


def test_each_end_of_a_host_is_acted_on(jobset: JobSet) -> None:
    ends: dict[type[BatonError], str] = {
        InvalidInput: "FailJobSet",
        RunLogError: "FailJobSet",
        AcceleratorLost: "RestartJobSetAndIgnoreMaxRestarts",
        StageLost: "RestartJobSetAndIgnoreMaxRestarts",
        BatonError: "RestartJobSet",
    }
    for error, action in ends.items():
        assert jobset.what_follows(error.exit_code) == action, error.__name__
    killed = 128 + 9
    assert jobset.what_follows(killed) == "RestartJobSet"
    assert jobset.what_follows(killed, disrupted=True) == "a new pod"
    assert jobset.what_follows(AcceleratorLost.exit_code, disrupted=True) == "RestartJobSetAndIgnoreMaxRestarts"
    assert jobset.manifest["spec"]["failurePolicy"]["maxRestarts"] > 0
    assert jobset.pod["restartPolicy"] == "Never"  # a condition of pod failure policies


def test_pods_get_gpus_of_spot_nodes(jobset: JobSet) -> None:
    resources = jobset.container["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == "1"
    assert {"cloud.google.com/gke-accelerator", "cloud.google.com/gke-spot"} == set(jobset.pod["nodeSelector"])
    tolerated = {each["key"] for each in jobset.pod["tolerations"]}
    assert tolerated == {"cloud.google.com/gke-spot", "nvidia.com/gpu"}
    (volume,), (mount,) = jobset.pod["volumes"], jobset.container["volumeMounts"]
    assert (volume["emptyDir"]["medium"], mount["mountPath"]) == ("Memory", "/dev/shm")  # noqa: S108
    assert volume["name"] == mount["name"]
    assert all("ephemeral-storage" in resources[kind] for kind in ("requests", "limits"))
    (priority,) = (each for each in jobset_documents() if each["kind"] == "PriorityClass")
    assert jobset.pod["priorityClassName"] == priority["metadata"]["name"]
