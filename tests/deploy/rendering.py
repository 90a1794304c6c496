"""What is deployed, without a cluster or engine.

A work pool's template is rendered with a deployment's job variables as a worker does it, and the JobSet as the
controllers of JobSet and of jobs do it.
"""

import asyncio
import json
import re
import uuid
from typing import Any

import yaml
from prefect.client.schemas.objects import FlowRun
from prefect_docker.worker import DockerWorkerJobConfiguration
from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

from tests.support.checkout import CHECKOUT

DEPLOY = CHECKOUT / "deploy"


def template(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((DEPLOY / "work-pools" / f"{name}.json").read_text(encoding="utf-8"))
    return read


def job_manifest(base: dict[str, Any], variables: dict[str, Any]) -> dict[str, Any]:
    """The Kubernetes job of a flow run."""
    made: dict[str, Any] = _prepared(KubernetesWorkerJobConfiguration, base, variables).job_manifest
    return made


def container(base: dict[str, Any], variables: dict[str, Any]) -> DockerWorkerJobConfiguration:
    """The container of a flow run."""
    made: DockerWorkerJobConfiguration = _prepared(DockerWorkerJobConfiguration, base, variables)
    return made


def _prepared(kind: Any, base: dict[str, Any], variables: dict[str, Any]) -> Any:
    # The client resolves references to blocks and variables of the server; the templates have none.
    configuration = asyncio.run(kind.from_template_and_values(base, variables, client=object()))
    configuration.prepare_for_flow_run(FlowRun(id=uuid.uuid4(), name="digits-cnn", flow_id=uuid.uuid4()))
    return configuration


def jobset_documents() -> list[dict[str, Any]]:
    """The documents of deploy/jobset.yaml."""
    return list(yaml.safe_load_all((DEPLOY / "jobset.yaml").read_text(encoding="utf-8")))


class JobSet:
    """The JobSet of deploy/jobset.yaml, with one job of several hosts."""

    def __init__(self) -> None:
        (self.manifest,) = (each for each in jobset_documents() if each["kind"] == "JobSet")
        (replicated,) = self.manifest["spec"]["replicatedJobs"]
        name = f"{self.manifest['metadata']['name']}-{replicated['name']}-0"
        self.job: dict[str, Any] = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name},
            **replicated["template"],
        }
        self.hosts = int(self.job["spec"]["completions"])
        self.pod: dict[str, Any] = self.job["spec"]["template"]["spec"]
        (self.container,) = self.pod["containers"]

    def environment(self, index: int) -> dict[str, str]:
        """The environment of the pod of an index, which the controller of an indexed job adds."""
        assert self.job["spec"]["completionMode"] == "Indexed"
        written = {each["name"]: each["value"] for each in self.container["env"]}
        return written | {"JOB_COMPLETION_INDEX": str(index)}

    def what_follows(self, code: int, *, disrupted: bool = False) -> str:
        """What the controllers do when a host ends with a code other than 0; the first rule that fits decides.

        Args:
            code: the exit code.
            disrupted: whether the pod was preempted or evicted.

        Returns:
            An action of JobSet, or "a new pod".
        """
        reason, text = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        for index, rule in enumerate(self.job["spec"]["podFailurePolicy"]["rules"]):
            codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions", [])
            if codes is not None:
                assert codes["containerName"] == self.container["name"]
                fits = (code in codes["values"]) == (codes["operator"] == "In")
            else:
                fits = disrupted and {"type": "DisruptionTarget"} in conditions
            if fits and rule["action"] == "Ignore":
                return "a new pod"
            if fits:
                assert rule["action"] == "FailJob"
                reason = "PodFailurePolicy"
                text = f"Container c for pod n/p failed with exit code {code} matching FailJob rule at index {index}"
                break
        assert self.job["spec"]["backoffLimit"] == 0
        for rule in self.manifest["spec"]["failurePolicy"]["rules"]:
            patterns = rule.get("onJobFailureMessagePatterns", [""])
            if reason in rule["onJobFailureReasons"] and any(re.search(pattern, text) for pattern in patterns):
                return str(rule["action"])
        return "RestartJobSet"  # counts towards maxRestarts
