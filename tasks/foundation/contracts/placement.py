"""`accelerator` and `stages` in the run file: which devices train, and where each stage runs.

Replicas share a global batch, and each may cut its share into micro-batches.
"""

import re
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from baton.tasks.foundation.contracts.base import Contract, environment, operational
from baton.tasks.foundation.errors import AcceleratorError
from baton.tasks.foundation.text import counted

_DEVICES = environment("other devices may give other bits")
_THREADS = environment(
    "other thread counts give other bits; left out, the counts that the run began with are set again on any machine"
)
_PLACE = operational("says where a stage runs, not what it does")

SERVER_PORT: Final = 8470  # of a TensorFlow server of a slice, as Google's
GRPC: Final = "grpc://"
_ADDRESS = re.compile(r"(?:\[(?P<v6>[^\[\]%]*)\]|(?P<name>[^\s:\[\]]+))(?::(?P<port>[0-9]{1,5}))?")
_LABEL = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_MOST_OF_NAME, _LAST_PORT = 253, 65535


def split_address(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Return the host and the port of an address: a name, an IPv4 address or `[IPv6]`, and `:port`.

    Args:
        text: the address. With a default port it may lack its own, and an IPv6 address its brackets.
        default_port: of an address without one, 1 to 65535; None: each must have its own.

    Raises:
        ValueError: it is none; names the text and what is wrong with it.
    """
    is_bare = text.count(":") > 1 and "[" not in text
    found = _ADDRESS.fullmatch(f"[{text}]" if is_bare else text)
    if found is None:
        raise ValueError(f"{text!r} is not the address of a host: write host:port, or [IPv6]:port")
    host = found["name"] or ""
    if found["v6"] is not None:
        try:
            host = str(IPv6Address(found["v6"]))
        except ValueError:
            raise ValueError(f"{text!r} is no IPv6 address, and host:port has one port only") from None
    elif not host.strip("0123456789."):
        try:
            IPv4Address(host)
        except ValueError:
            raise ValueError(f"{text!r} is no IPv4 address, and a name has letters") from None
    elif len(host) > _MOST_OF_NAME or not all(map(_LABEL.fullmatch, host.split("."))):
        raise ValueError(f"{text!r} is not the name of a host")
    if found["port"] is None and default_port is None:
        raise ValueError(f"{text!r} has no port: write host:port, or [IPv6]:port")
    port = int(found["port"] or default_port or 0)
    if not 1 <= port <= _LAST_PORT:
        raise ValueError(f"{text!r} has port {port}; ports are 1 to {_LAST_PORT}")
    return host, port


def canonical_address(text: str, default_port: int | None = None) -> str:
    """Return an address as `host:port` or `[IPv6]:port`; for arguments and errors see `split_address`."""
    host, port = split_address(text, default_port)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class AcceleratorSpec(Contract):
    """The devices to train on."""

    kind: Annotated[Literal["auto", "tpu", "gpu", "cpu", "multi_worker"], _DEVICES] = Field(
        default="auto", description="auto, tpu, gpu, cpu or multi_worker"
    )
    replicas: Annotated[int, environment("the same global batches on other replicas: equal to float tolerance")] = (
        Field(default=1, ge=1, le=64, description="model copies on a CPU, 1 to 64; needs kind: cpu")
    )
    tpu: Annotated[str, _DEVICES] = Field(
        default="local",
        min_length=1,
        description="local: the TPU of this machine; slice: the TensorFlow servers of all hosts of its slice; or a "
        "TPU's name, or grpc:// addresses of its servers, with commas between them",
    )
    intra_op_threads: Annotated[int | None, _THREADS] = Field(
        default=None,
        ge=1,
        le=1024,
        description="threads within an operation; left out: the number of CPUs at the first start",
    )
    inter_op_threads: Annotated[int | None, _THREADS] = Field(
        default=None, ge=1, le=1024, description="operations at a time; left out: the number of CPUs at the first start"
    )

    connect_seconds: Annotated[float, operational("how long hosts wait for each other before they begin")] = Field(
        default=600.0, gt=0, description="seconds to wait for other hosts or TensorFlow servers, then exit code 3"
    )

    @model_validator(mode="after")
    def _replicas_need_cpu(self) -> Self:
        if self.replicas > 1 and self.kind != "cpu":
            raise ValueError(f"replicas: {self.replicas} needs kind: cpu; other kinds use the devices they find")
        return self

    @model_validator(mode="after")
    def _name_needs_tpu(self) -> Self:
        if self.tpu != "local" and self.kind != "tpu":
            raise ValueError(f"tpu: {self.tpu} needs kind: tpu")
        for each in self.tpu.split(",") if "://" in self.tpu else ():
            try:
                # What lacks the prefix is no address either.
                split_address(each.removeprefix(GRPC) if each.startswith(GRPC) else "", SERVER_PORT)
            except ValueError as fault:
                raise ValueError(
                    f"tpu: {self.tpu}: write grpc://HOST:PORT for each server, with commas between them ({fault})"
                ) from None
        return self


def _check_deployment(name: str) -> str:
    flow, separator, deployment = name.partition("/")
    if not separator or not flow.strip() or not deployment.strip() or "/" in deployment:
        raise ValueError("name a deployment as Prefect does, FLOW/DEPLOYMENT, such as train-segment/docker")
    return name


def _deployment_from_string(value: object) -> object:
    return {"deployment": value} if isinstance(value, str) else value


class StageSpec(Contract):
    """Where a stage runs."""

    deployment: Annotated[Annotated[str, AfterValidator(_check_deployment)] | None, _PLACE] = Field(
        default=None,
        description="the Prefect deployment that runs the stage, as train-segment/docker; left out: the flow's process",
    )
    code_folder: Annotated[str | None, _PLACE] = Field(
        default=None,
        min_length=1,
        description="the run file's folder where that deployment runs, such as /code; left out: the same path as here",
    )

    @model_validator(mode="after")
    def _code_folder_needs_deployment(self) -> Self:
        if self.code_folder is not None and self.deployment is None:
            raise ValueError(
                "code_folder is where a deployment finds the code; name the deployment too, or drop code_folder"
            )
        return self


class EvaluateStageSpec(StageSpec):
    """Where evaluation runs, and on which devices."""

    accelerator: Annotated[AcceleratorSpec | None, operational("other devices may give other bits of metrics only")] = (
        Field(
            default=None, description="the devices of that deployment, such as {kind: cpu}; left out: those of training"
        )
    )

    @model_validator(mode="after")
    def _accelerator_needs_deployment(self) -> Self:
        if self.accelerator is not None and self.deployment is None:
            raise ValueError("a process has one accelerator; name a deployment for the stage, or drop accelerator")
        if self.accelerator is not None and self.accelerator.kind == "multi_worker":
            raise ValueError("a stage is one process; accelerator.kind = multi_worker needs several")
        return self


_Stage = Annotated[StageSpec, BeforeValidator(_deployment_from_string)]


class StagesSpec(Contract):
    """Which stages run as Prefect deployments, each on its own work pool."""

    prepare_data: _Stage = Field(default_factory=StageSpec, description="{deployment: prepare-data/docker}")
    init_or_restore: _Stage = Field(
        default_factory=StageSpec, description="{deployment: init-or-restore/docker}, on devices like those of training"
    )
    train_segment: _Stage = Field(default_factory=StageSpec, description="{deployment: train-segment/docker}")
    checkpoint_to_gcs: _Stage = Field(default_factory=StageSpec, description="{deployment: checkpoint-to-gcs/docker}")
    evaluate: Annotated[EvaluateStageSpec, BeforeValidator(_deployment_from_string)] = Field(
        default_factory=EvaluateStageSpec, description="{deployment: evaluate/docker, accelerator: {kind: cpu}}"
    )

    def remote(self) -> dict[str, StageSpec]:
        """The stages that run as deployments, by name, in the order of a run."""
        chosen = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: stage for name, stage in chosen.items() if stage.deployment is not None}


def per_replica_batch_size(global_batch_size: int, replicas: int, accumulate: int = 1) -> int:
    """Examples of one replica in a step; a multiple of `accumulate`.

    Args:
        global_batch_size: examples of a step over all replicas, at least 1.
        replicas: model copies, at least 1.
        accumulate: micro-batches of one replica in a step, at least 1.

    Raises:
        AcceleratorError: the global batch is not divisible; the message names the nearest sizes that are.
    """
    parts = replicas * accumulate
    if global_batch_size % parts:
        below = global_batch_size // parts * parts
        good = " or ".join(str(size) for size in (below, below + parts) if size)
        cut = counted(replicas, "replica") + ("" if accumulate == 1 else f" of {accumulate} micro-batches")
        others = "" if accumulate == 1 else _other_cuts(global_batch_size, replicas, accumulate)
        raise AcceleratorError(
            f"train.global_batch_size = {global_batch_size} is not divisible by {cut}; try {good}{others}"
        )
    return global_batch_size // replicas


def micro_batch_size(global_batch_size: int, replicas: int, accumulate: int) -> int:
    """Examples of one micro-batch of one replica. Arguments and errors: see `per_replica_batch_size`."""
    return per_replica_batch_size(global_batch_size, replicas, accumulate) // accumulate


def _other_cuts(global_batch_size: int, replicas: int, accumulate: int) -> str:
    """The nearest values of train.accumulate below and above that divide this batch, if any."""
    if global_batch_size % replicas:
        return ""
    divisors = list(_divisors(global_batch_size // replicas))
    near = [
        *([max(below)] if (below := [each for each in divisors if each < accumulate]) else []),
        *([min(above)] if (above := [each for each in divisors if each > accumulate]) else []),
    ]
    return f"; or train.accumulate = {' or '.join(map(str, near))}"


def _divisors(number: int) -> Iterator[int]:
    for each in range(1, int(number**0.5) + 1):
        if number % each == 0:
            yield each
            yield number // each
