"""`tf.distribute.TPUStrategy` for this machine's TPU.

`tpu_environment` checks everything that needs no TensorFlow. This module makes the TensorFlow calls; the error of a
failed call names the call and its target.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import tensorflow as tf

from tasks.foundation.contracts.placement import AcceleratorSpec
from tasks.foundation.errors import AcceleratorError
from tasks.foundation.machine.metadata_server import metadata_address
from tasks.foundation.machine.tpu_environment import looked_at, require_local_tpu, require_packages

# For a TPU behind a TensorFlow server: the training process itself writes and reads checkpoints.
IO_DEVICE: Final = "/job:localhost"
_GRPC, _PORT = "grpc://", 8470
_CONNECT_SECONDS = 5.0


def tpu_strategy(spec: AcceleratorSpec, *, again: bool = False) -> Any:
    """A `tf.distribute.TPUStrategy` over all cores of this machine's TPU.

    Args:
        spec: `accelerator` of the run file; its `tpu` is `local`, or a name or address of this machine's TPU.
        again: whether this process had the TPU and lost it. It is then shut down first, and loses all its state.

    Raises:
        AcceleratorError: the TPU is missing, is not this machine's, does not respond, or cannot be initialized.
    """
    resolver = _local() if spec.tpu == "local" else _named(spec)
    if again:
        with _as_accelerator_error(spec, "tf.tpu.experimental.shutdown_tpu_system"):
            tf.tpu.experimental.shutdown_tpu_system(resolver)
    if spec.tpu != "local":
        with _as_accelerator_error(spec, "tf.config.experimental_connect_to_cluster"):
            tf.config.experimental_connect_to_cluster(resolver)
    with _as_accelerator_error(spec, "tf.tpu.experimental.initialize_tpu_system"):
        tf.tpu.experimental.initialize_tpu_system(resolver)
    with _as_accelerator_error(spec, "tf.distribute.TPUStrategy"):
        return tf.distribute.TPUStrategy(resolver)


def _local() -> Any:
    require_local_tpu()
    with _as_accelerator_error(AcceleratorSpec(kind="tpu"), "tf.distribute.cluster_resolver.TPUClusterResolver"):
        return tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")


def _named(spec: AcceleratorSpec) -> Any:
    """The resolver of a TPU behind a TensorFlow server on this machine."""
    require_packages()
    # Without a metadata server, TensorFlow would look for one without a time limit.
    if not spec.tpu.startswith(_GRPC) and metadata_address() is None:
        raise _not_this_machine(spec, "this machine is not on Google Cloud")
    with _as_accelerator_error(spec, "tf.distribute.cluster_resolver.TPUClusterResolver"):
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=spec.tpu)
        workers = list(resolver.cluster_spec().job_tasks(resolver.task_type))
    # Another machine could not read the examples from this machine's disk.
    host, _, port = workers[0].partition(":")
    if len(workers) > 1 or not _is_this_machine(host):
        raise _not_this_machine(spec, f"it is at {', '.join(workers)}")
    try:
        socket.create_connection((host, int(port or _PORT)), timeout=_CONNECT_SECONDS).close()
    except OSError as fault:
        raise AcceleratorError(
            f"accelerator.tpu = {spec.tpu}: no TensorFlow server responds at {workers[0]} ({fault}); start one, or use "
            "accelerator.tpu: local"
        ) from fault
    return resolver


def _not_this_machine(spec: AcceleratorSpec, why: str) -> AcceleratorError:
    return AcceleratorError(
        f"accelerator.tpu = {spec.tpu} is not the TPU of this machine ({why}); run baton on the TPU VM itself, with "
        "accelerator.tpu: local"
    )


def _is_this_machine(host: str) -> bool:
    """Whether an address belongs to this machine: only such addresses can be bound."""
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))
    except OSError:
        return False
    return True


@contextmanager
def _as_accelerator_error(spec: AcceleratorSpec, call: str) -> Iterator[None]:
    """Turn any failure of a TensorFlow call into an `AcceleratorError` that describes the TPU."""
    try:
        yield
    except Exception as fault:
        reason = " ".join(str(fault).split())
        raise AcceleratorError(
            f"accelerator.tpu = {spec.tpu}: {call} failed with {type(fault).__name__}: {reason}. {looked_at()}; "
            f"logical devices: {_logical_devices()}. Check that no other process uses the TPU and that it is ready"
        ) from fault


def _logical_devices() -> str:
    try:
        return ", ".join(device.name for device in tf.config.list_logical_devices()) or "none"
    except (RuntimeError, tf.errors.OpError) as fault:
        return f"unavailable ({type(fault).__name__})"
