"""Kubernetes and Docker accept what workers render from the work-pool templates."""

import json
import re
from typing import Any

import docker
import kubernetes_validate
import pytest
import yaml
from docker.models import containers

from tests.deploy.rendering import DEPLOY, container, job_manifest, template

IMAGE = {"image": "registry/baton/train-tpu"}
# The only variables that differ between the two Kubernetes templates.
TPU_VARIABLES = {"tpu_accelerator", "tpu_topology", "tpu_chips", "spot", "privileged"}


def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["spec"]["template"]["spec"]
    return found


def environment(manifest: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in pod(manifest)["containers"][0]["env"]}


@pytest.mark.parametrize("name", ["process", "docker", "kubernetes", "tpu"])
def test_every_variable_is_used_and_described(name: str) -> None:
    read = template(name)
    variables = read["variables"]["properties"]
    used = json.dumps(read["job_configuration"])
    for variable, schema in variables.items():
        assert f"{{{{ {variable} }}}}" in used, variable
        assert schema["title"], variable
        assert schema["description"].endswith((".", "].")), variable
        assert ("default" in schema) != (variable in read["variables"].get("required", [])), variable
    assert used.count("{{ ") == sum(used.count(f"{{{{ {variable} }}}}") for variable in variables)


@pytest.mark.parametrize("name", ["kubernetes", "tpu"])
def test_jobs_are_valid_for_kubernetes(name: str) -> None:
    manifest = job_manifest(template(name), IMAGE)
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    job = manifest["spec"]
    assert job["backoffLimit"] == 0
    assert (job["completions"], job["parallelism"]) == (1, 1)
    assert pod(manifest)["restartPolicy"] == "Never"
    assert pod(manifest)["terminationGracePeriodSeconds"] == 300
    assert pod(manifest)["serviceAccountName"] == "baton"
    assert {"name": "shm", "mountPath": "/dev/shm"} in pod(manifest)["containers"][0]["volumeMounts"]  # noqa: S108
    spot = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
    assert spot in pod(manifest)["tolerations"]
    # The worker sets it because of backoffLimit 0.
    assert environment(manifest)["PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"] == "reschedule"
    assert environment(manifest)["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "60"
    assert environment(manifest)["PREFECT_HOME"].startswith("/tmp/")  # noqa: S108 - not the worker's own home


def test_validator_refuses_invalid_job() -> None:
    manifest = job_manifest(template("tpu"), IMAGE)
    pod(manifest)["gracePeriod"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_tpu_jobs_request_tpu_on_spot_node() -> None:
    manifest = job_manifest(template("tpu"), IMAGE)
    assert pod(manifest)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "2x4",
        "cloud.google.com/gke-spot": "true",
    }
    resources = pod(manifest)["containers"][0]["resources"]
    assert resources["requests"]["google.com/tpu"] == resources["limits"]["google.com/tpu"] == "8"
    assert {"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"} in pod(manifest)["tolerations"]


def test_gpu_jobs_request_gpus_of_a_type() -> None:
    written = yaml.safe_load((DEPLOY / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    (variables,) = [
        each["work_pool"]["job_variables"]
        for each in written
        if each["name"] == "gpu" and each["entrypoint"].endswith(":train_segment")
    ]
    more = {"image_pull_secrets": [{"name": "registry"}], "priority_class": "training", "ephemeral_storage": "50Gi"}
    manifest = job_manifest(template("kubernetes"), variables | more)
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    (made,) = pod(manifest)["containers"]
    assert made["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert made["resources"]["requests"]["ephemeral-storage"] == "50Gi"
    assert pod(manifest)["nodeSelector"]["cloud.google.com/gke-accelerator"] == "nvidia-l4"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod(manifest)["tolerations"]
    assert pod(manifest)["volumes"][0]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert (pod(manifest)["imagePullSecrets"], pod(manifest)["priorityClassName"]) == (
        [{"name": "registry"}],
        "training",
    )
    # Nothing of it is requested by default.
    plain = pod(job_manifest(template("kubernetes"), IMAGE))
    assert plain["containers"][0]["resources"] == {"requests": {"cpu": "1", "memory": "4Gi"}, "limits": {}}
    assert "priorityClassName" not in plain


def test_other_tpu_and_on_demand_nodes() -> None:
    base = template("tpu")
    del base["variables"]["properties"]["spot"]["default"]
    manifest = job_manifest(base, IMAGE | {"tpu_accelerator": "tpu-v6e-slice", "tpu_topology": "1x1", "tpu_chips": "1"})
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    assert pod(manifest)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v6e-slice",
        "cloud.google.com/gke-tpu-topology": "1x1",
    }
    assert pod(manifest)["containers"][0]["resources"]["limits"]["google.com/tpu"] == "1"


def test_run_files_can_be_a_volume() -> None:
    base = template("kubernetes")
    shm = base["variables"]["properties"]
    variables = IMAGE | {
        "volumes": [*shm["volumes"]["default"], {"name": "code", "configMap": {"name": "digits"}}],
        "volume_mounts": [*shm["volume_mounts"]["default"], {"name": "code", "mountPath": "/code", "readOnly": True}],
        "node_selector": {"cloud.google.com/gke-spot": "true"},
        "memory_limit": "8Gi",
        "env": {"BATON_CACHE_BYTES": "1000000"},
    }
    manifest = job_manifest(base, variables)
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    assert [each["mountPath"] for each in pod(manifest)["containers"][0]["volumeMounts"]] == ["/dev/shm", "/code"]  # noqa: S108
    assert pod(manifest)["nodeSelector"] == {"cloud.google.com/gke-spot": "true"}
    # A deployment's variables are added to the template's.
    assert environment(manifest)["BATON_CACHE_BYTES"] == "1000000"
    assert environment(manifest)["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "60"


def test_kubernetes_templates_differ_only_in_devices() -> None:
    plain, tpu = template("kubernetes"), template("tpu")
    of_plain, of_tpu = plain["variables"]["properties"], tpu["variables"]["properties"]
    assert set(of_tpu) - set(of_plain) == TPU_VARIABLES
    assert set(of_plain) - set(of_tpu) == {"node_selector", "gpus"}
    for manifest in (plain, tpu):
        of_pod = pod(manifest["job_configuration"]["job_manifest"])
        del of_pod["nodeSelector"]
        of_pod["containers"][0].pop("securityContext", None)
        for kind in ("requests", "limits"):
            of_pod["containers"][0]["resources"][kind].pop("google.com/tpu", None)
            of_pod["containers"][0]["resources"][kind].pop("nvidia.com/gpu", None)
    assert plain["job_configuration"] == tpu["job_configuration"]


def test_containers_are_valid_for_docker() -> None:
    config = container(template("docker"), {"image": "baton/train-gpu", "volumes": ["./deploy/runs:/code:ro"]})
    assert config.image == "baton/train-gpu"
    assert config.image_pull_policy == "Never"  # a missing image is not pulled from a public registry
    assert config.env["PREFECT_FLOW_RUN_EXECUTE_SIGTERM_BEHAVIOR"] == "reschedule"
    assert config.env["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"] == "60"
    assert config.command == "prefect flow-run execute"
    assert config.container_create_kwargs == {"shm_size": "1g"}
    assert re.fullmatch(r"digits-cnn-[0-9a-f-]{36}-0", config.name or "")
    # With any other value no container is created.
    known = {*containers.RUN_CREATE_KWARGS, *containers.RUN_HOST_CONFIG_KWARGS}
    assert set(template("docker")["job_configuration"]["container_create_kwargs"]) <= known


def test_gpu_requests_are_valid_for_docker() -> None:
    gpus = template("docker")["variables"]["properties"]["device_requests"]["description"]
    requests = json.loads(gpus[gpus.index("[") : gpus.rindex("]") + 1])
    config = container(template("docker"), {"image": "baton/train-gpu", "device_requests": requests, "user": "0"})
    settings = config.container_create_kwargs or {}
    host = docker.types.HostConfig(version="1.44", **{key: settings[key] for key in ("shm_size", "device_requests")})
    assert host["ShmSize"] == 1 << 30
    assert host["DeviceRequests"][0]["Capabilities"] == [["gpu"]]
    assert settings["user"] == "0"
