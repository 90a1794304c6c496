"""Render a work pool's template with a deployment's job variables as a worker does, without a cluster or engine."""

import asyncio
import json
import uuid
from typing import Any

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
