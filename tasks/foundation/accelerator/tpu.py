"""A TPU: found, connected, initialized, and the strategy over its cores.

Kept thin: what can be known without TensorFlow is known from `tpu_environment`, and from the first call on that needs
hardware there is nothing but TensorFlow's own four calls, each of whose failures says what was tried.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import tensorflow as tf

from tasks.foundation.accelerator.tpu_environment import looked_at, require_local_tpu, require_packages
from tasks.foundation.contracts.placement import AcceleratorSpec
from tasks.foundation.errors import AcceleratorError
from tasks.foundation.stops.metadata_server import metadata_address

# Where tensors of a TPU behind gRPC are written and read: by the process that trains, as everything else is.
IO_DEVICE: Final = "/job:localhost"
_GRPC, _PORT = "grpc://", 8470
_ANSWER_SECONDS = 5.0


def tpu_strategy(spec: AcceleratorSpec, *, again: bool = False) -> Any:
    """A `tf.distribute.TPUStrategy` over all cores of the TPU that the run file names.

    Args:
        spec: `tpu`, `zone`, `project`.
        again: this process had it and lost it, so it is shut down first. Whatever lived on it is gone.

    Raises:
        AcceleratorError: it is not there, does not answer, is not on this machine, or cannot be initialized.
    """
    resolver = _local() if spec.tpu == "local" else _named(spec)
    if again:
        with _trying(spec, "tf.tpu.experimental.shutdown_tpu_system"):
            tf.tpu.experimental.shutdown_tpu_system(resolver)
    if spec.tpu != "local":
        with _trying(spec, "tf.config.experimental_connect_to_cluster"):
            tf.config.experimental_connect_to_cluster(resolver)
    with _trying(spec, "tf.tpu.experimental.initialize_tpu_system"):
        tf.tpu.experimental.initialize_tpu_system(resolver)
    with _trying(spec, "tf.distribute.TPUStrategy"):
        return tf.distribute.TPUStrategy(resolver)


def _local() -> Any:
    require_local_tpu()
    with _trying(AcceleratorSpec(kind="tpu"), "tf.distribute.cluster_resolver.TPUClusterResolver"):
        return tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")


def _named(spec: AcceleratorSpec) -> Any:
    """The resolver of a TPU behind gRPC, whose one worker is a process of this machine."""
    require_packages()
    # TensorFlow asks the metadata server for what is left out, without a time limit.
    left_out = [key for key in ("zone", "project") if getattr(spec, key) is None]
    if left_out and not spec.tpu.startswith(_GRPC) and metadata_address() is None:
        raise AcceleratorError(
            f"accelerator.tpu = {spec.tpu}: this is no machine of Google's that would know its zone and project; say "
            f"accelerator.{' and accelerator.'.join(left_out)}"
        )
    with _trying(spec, "tf.distribute.cluster_resolver.TPUClusterResolver"):
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=spec.tpu, zone=spec.zone, project=spec.project)
        workers = list(resolver.cluster_spec().job_tasks(resolver.task_type))
    if len(workers) != 1:
        raise AcceleratorError(
            f"accelerator.tpu = {spec.tpu} has {len(workers)} hosts ({', '.join(workers)}); training over the hosts "
            "of a slice is not supported by this version: take a slice of one host, such as v5litepod-8"
        )
    host, _, port = workers[0].partition(":")
    if not _is_here(host):
        # The examples lie in files of this machine, which another one's part of the pipeline cannot read.
        raise AcceleratorError(
            f"accelerator.tpu = {spec.tpu} is at {workers[0]}, another machine, which cannot read the examples from "
            "this one's disk; run baton on the TPU VM itself, with accelerator.tpu: local"
        )
    try:
        socket.create_connection((host, int(port or _PORT)), timeout=_ANSWER_SECONDS).close()
    except OSError as fault:
        raise AcceleratorError(
            f"accelerator.tpu = {spec.tpu}: nothing answers at {workers[0]} ({fault}); start a TensorFlow server "
            "there, or use accelerator.tpu: local"
        ) from fault
    return resolver


def _is_here(host: str) -> bool:
    """Whether an address is one of this machine's: only those can be bound to."""
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


@contextmanager
def _trying(spec: AcceleratorSpec, call: str) -> Iterator[None]:
    """Every failure of TensorFlow's says what was tried, on what, and what was looked at."""
    try:
        yield
    except Exception as fault:
        said = " ".join(str(fault).split())
        raise AcceleratorError(
            f"accelerator.tpu = {spec.tpu}: {call} failed with {type(fault).__name__}: {said}. {looked_at()}; logical "
            f"devices: {_logical_devices()}. See that no other process holds the TPU, and that it is ready"
        ) from fault


def _logical_devices() -> str:
    try:
        return ", ".join(device.name for device in tf.config.list_logical_devices()) or "none"
    except (RuntimeError, tf.errors.OpError) as fault:
        return f"not to be had ({type(fault).__name__})"
