"""Kubernetes and JobSet accept deploy/jobset.yaml, and it does with each end of Baton what the end means.

No light package has JobSet's own schema, so `SCHEMA` has the fields of v1alpha2 that concern a manifest like this one.
"""

import copy
import re
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tasks.foundation.contracts.placement import AcceleratorSpec
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.errors import AcceleratorLost, BatonError, InvalidInput, RunLogError, StageLost
from tasks.foundation.machine.cluster import cluster_of, is_chief
from tests.support.checkout import CHECKOUT

FILE = CHECKOUT / "deploy" / "jobset.yaml"
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


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(FILE.read_text(encoding="utf-8")))


@pytest.fixture
def jobset() -> dict[str, Any]:
    (found,) = (each for each in documents() if each["kind"] == "JobSet")
    return found


def job(jobset: dict[str, Any]) -> dict[str, Any]:
    """The job as JobSet's controller creates it."""
    (replicated,) = jobset["spec"]["replicatedJobs"]
    name = f"{jobset['metadata']['name']}-{replicated['name']}-0"
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, **replicated["template"]}


def pod(jobset: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job(jobset)["spec"]["template"]["spec"]
    return found


def environment(jobset: dict[str, Any], index: int) -> dict[str, str]:
    """The environment of the pod of an index: a value may name variables that stand before it."""
    found: dict[str, str] = {}
    for each in pod(jobset)["containers"][0]["env"]:
        if "valueFrom" in each:
            path = each["valueFrom"]["fieldRef"]["fieldPath"]
            assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            found[each["name"]] = str(index)
        else:
            found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], each["value"])
    return found


def test_every_document_is_valid(jobset: dict[str, Any]) -> None:
    newest = kubernetes_validate.latest_version()
    for each in [*(each for each in documents() if each["kind"] != "JobSet"), job(jobset)]:
        kubernetes_validate.validate(each, newest, strict=True)
    jsonschema.Draft202012Validator(SCHEMA).validate(jobset)
    # The name of a pod has five more characters.
    assert len(f"{job(jobset)['metadata']['name']}-{HOSTS - 1}-abcde") <= 63
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
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
def test_invalid_jobset_is_refused(jobset: dict[str, Any], place: tuple[Any, ...], value: Any) -> None:
    changed = copy.deepcopy(jobset)
    below: Any = changed
    for key in place[:-1]:
        below = below[key]
    below[place[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(changed)


def test_hosts_are_the_pods_of_the_jobset(jobset: dict[str, Any]) -> None:
    spec, name = job(jobset)["spec"], jobset["metadata"]["name"]
    assert (spec["completionMode"], spec["parallelism"], spec["completions"]) == ("Indexed", HOSTS, HOSTS)
    assert jobset["spec"]["network"]["enableDNSHostnames"]
    subdomain = jobset["spec"]["network"].get("subdomain", name)
    (port,) = pod(jobset)["containers"][0]["ports"]
    expected = tuple(f"{name}-worker-0-{index}.{subdomain}:{port['containerPort']}" for index in range(HOSTS))
    clusters = [cluster_of(environment(jobset, index)) for index in range(HOSTS)]
    assert {cluster.addresses for cluster in clusters} == {expected}
    assert [cluster.host for cluster in clusters] == list(range(HOSTS))
    several = AcceleratorSpec(kind="multi_worker")
    assert [is_chief(several, environment(jobset, index)) for index in range(HOSTS)] == [True, False, False]


def test_the_command_is_valid(jobset: dict[str, Any]) -> None:
    (container,) = pod(jobset)["containers"]
    program, verb, file, *overrides = container["args"]
    assert (program, verb, file) == ("baton", "run", "/code/run.yaml")
    settings = [each.removeprefix("--set=") for each in overrides]
    spec = load_run_file(CHECKOUT / "deploy" / "runs" / "text" / "run.yaml", settings).spec
    assert spec.accelerator.kind == "multi_worker"
    assert spec.storage == "gs://BUCKET/runs"
    assert spec.stop.grace_seconds < 15 <= pod(jobset)["terminationGracePeriodSeconds"]


def what_follows(jobset: dict[str, Any], code: int, *, disrupted: bool = False) -> str:
    """What the controllers of Job and JobSet do when a host ends with this code. The first rule that fits decides."""
    reason, text = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for index, rule in enumerate(job(jobset)["spec"]["podFailurePolicy"]["rules"]):
        codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions", [])
        if codes is not None:
            assert codes["containerName"] == pod(jobset)["containers"][0]["name"]
            fits = (code in codes["values"]) == (codes["operator"] == "In")
        else:
            fits = disrupted and {"type": "DisruptionTarget"} in conditions
        if fits and rule["action"] == "Ignore":
            return "a new pod"
        if fits:
            assert rule["action"] == "FailJob"
            reason = "PodFailurePolicy"
            text = (
                f"Container baton for pod prefect/p failed with exit code {code} matching FailJob rule at index {index}"
            )
            break
    assert job(jobset)["spec"]["backoffLimit"] == 0
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, text) for pattern in patterns):
            return str(rule["action"])
    return "RestartJobSet"  # counts towards maxRestarts


def test_each_end_of_a_host_is_acted_on(jobset: dict[str, Any]) -> None:
    ends: dict[type[BatonError], str] = {
        InvalidInput: "FailJobSet",
        RunLogError: "FailJobSet",
        AcceleratorLost: "RestartJobSetAndIgnoreMaxRestarts",
        StageLost: "RestartJobSetAndIgnoreMaxRestarts",
        BatonError: "RestartJobSet",
    }
    for error, action in ends.items():
        assert what_follows(jobset, error.exit_code) == action, error.__name__
    killed = 128 + 9
    assert what_follows(jobset, killed) == "RestartJobSet"
    assert what_follows(jobset, killed, disrupted=True) == "a new pod"
    assert what_follows(jobset, AcceleratorLost.exit_code, disrupted=True) == "RestartJobSetAndIgnoreMaxRestarts"
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0
    assert pod(jobset)["restartPolicy"] == "Never"  # a condition of pod failure policies


def test_pods_get_gpus_of_spot_nodes(jobset: dict[str, Any]) -> None:
    spec = pod(jobset)
    (container,) = spec["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {"cloud.google.com/gke-accelerator", "cloud.google.com/gke-spot"} == set(spec["nodeSelector"])
    tolerated = {each["key"] for each in spec["tolerations"]}
    assert tolerated == {"cloud.google.com/gke-spot", "nvidia.com/gpu"}
    (volume,), (mount,) = spec["volumes"], container["volumeMounts"]
    assert (volume["emptyDir"]["medium"], mount["mountPath"]) == ("Memory", "/dev/shm")  # noqa: S108
    assert volume["name"] == mount["name"]
    for limit in ("requests", "limits"):
        assert "ephemeral-storage" in container["resources"][limit]
    (priority,) = (each for each in documents() if each["kind"] == "PriorityClass")
    assert spec["priorityClassName"] == priority["metadata"]["name"]
