"""What is deployed, without a cluster or engine.

A work pool's template is rendered with a deployment's job variables as a worker does it, and a JobSet as the
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


def documents(name: str) -> list[dict[str, Any]]:
    """The documents of a YAML file of deploy/."""
    return list(yaml.safe_load_all((DEPLOY / name).read_text(encoding="utf-8")))


class JobOfJobSet:
    """A job of a JobSet of deploy/, with all its pods."""

    def __init__(self, file: str, name: str) -> None:
        (self.jobset,) = documents(file)
        (replicated,) = (each for each in self.jobset["spec"]["replicatedJobs"] if each["name"] == name)
        assert replicated["replicas"] == 1
        self.manifest: dict[str, Any] = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": f"{self.jobset['metadata']['name']}-{name}-0"},
            **replicated["template"],
        }
        self.spec: dict[str, Any] = self.manifest["spec"]
        self.pods = int(self.spec["completions"])
        self.pod: dict[str, Any] = self.spec["template"]["spec"]
        (self.container,) = self.pod["containers"]

    def addresses(self) -> list[str]:
        """Host and port of each pod, behind the headless service that JobSet creates."""
        network, job = self.jobset["spec"]["network"], self.manifest["metadata"]["name"]
        assert network["enableDNSHostnames"]
        subdomain = network.get("subdomain", self.jobset["metadata"]["name"])
        (port,) = self.container["ports"]
        return [f"{job}-{index}.{subdomain}:{port['containerPort']}" for index in range(self.pods)]

    def settings(self) -> list[str]:
        """The overrides of `baton run`."""
        program, verb, file, *overrides = self.container["args"]
        assert (program, verb, file) == ("baton", "run", "/code/run.yaml")
        return [each.removeprefix("--set=") for each in overrides]

    def environment(self, index: int) -> dict[str, str]:
        """The environment of the pod of an index, which the controller of an indexed job adds."""
        assert self.spec["completionMode"] == "Indexed"
        written = {each["name"]: each["value"] for each in self.container["env"]}
        return written | {"JOB_COMPLETION_INDEX": str(index)}

    def what_follows(self, code: int, *, disrupted: bool = False, crashes: int = 0) -> str:
        """What the controllers do when a pod ends; the first rule that fits decides.

        Args:
            code: the exit code.
            disrupted: whether the pod was preempted or evicted.
            crashes: pods before it that counted.

        Returns:
            An action of JobSet, "complete", "the same pod" or "a new pod".
        """
        if code == 0:
            return "complete"
        if self.pod["restartPolicy"] == "OnFailure":
            assert "podFailurePolicy" not in self.spec  # Kubernetes refuses it
        rule = self._first_rule(code, disrupted=disrupted)
        if rule is None and crashes < self.spec["backoffLimit"]:
            return "the same pod" if self.pod["restartPolicy"] == "OnFailure" and not disrupted else "a new pod"
        if rule is not None and self.spec["podFailurePolicy"]["rules"][rule]["action"] == "Ignore":
            return "a new pod"
        reason, text = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        if rule is not None:
            reason = "PodFailurePolicy"
            text = f"Container c for pod n/p failed with exit code {code} matching FailJob rule at index {rule}"
        policy = self.jobset["spec"].get("failurePolicy")
        for each in policy["rules"] if policy else ():
            patterns = each.get("onJobFailureMessagePatterns", [""])
            if reason in each["onJobFailureReasons"] and any(re.search(pattern, text) for pattern in patterns):
                return str(each["action"])
        return "RestartJobSet" if policy else "FailJobSet"  # a restart counts towards maxRestarts

    def _first_rule(self, code: int, *, disrupted: bool) -> int | None:
        for index, rule in enumerate(self.spec.get("podFailurePolicy", {"rules": []})["rules"]):
            assert rule["action"] in {"FailJob", "Ignore"}
            codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions", [])
            if codes is not None:
                assert codes["containerName"] == self.container["name"]
                fits = (code in codes["values"]) == (codes["operator"] == "In")
            else:
                fits = disrupted and {"type": "DisruptionTarget", "status": "True"} in conditions
            if fits:
                return index
        return None
