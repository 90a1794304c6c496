"""This machine's TPU: found without TensorFlow, announced to it, checked, and used by a `tf.distribute.TPUStrategy`.

What finds it reads only device files, environment variables and installed packages, so it never waits for a network,
and it runs before TensorFlow is imported, which reads the variables that `announce_tpu` sets. Only the metadata server
of a TPU VM is asked for the type of the TPU and the number of the worker.

A slice of several hosts has a TensorFlow server on each, Google's or `serve`, and one client: Baton, on worker 0 or on
another machine. A lost host fails the call that needs it. TensorFlow is imported only by `tpu_strategy` and
`serve`; the error of a failed call names the call and its target.

Sizes and memory of TPU types are from Google's documentation (cloud.google.com/tpu/docs: "System architecture", "v2" to
"v6e", as of 2025). Names count TensorCores for v2, v3, v4 and v5p, which have two per chip, and chips for v5e
(`v5litepod-…`) and v6e. TensorFlow has one replica per core on v2 and v3, and one per chip on the others. Gigabytes are
decimal, because the runtime reserves some of the memory.
"""

import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from baton.tasks.foundation.contracts.placement import (
    GRPC,
    SERVER_PORT,
    AcceleratorSpec,
    canonical_address,
    split_address,
)
from baton.tasks.foundation.errors import AcceleratorError, AcceleratorLost
from baton.tasks.foundation.machine.metadata_server import instance_attribute, metadata_address

_GB = 10**9
_CHIPS_OF_A_HOST = 4
_SHOWN = 5
_DEVICES = Path("/dev")
# TPU v2 to v4, then v5e and later. /dev/accel/ belongs to other vendors' chips; many machines have /dev/vfio/vfio.
_DEVICE_FILES: Final = ("accel[0-9]*", "vfio/[0-9]*")
_DISTRIBUTIONS: Final = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-tpu", "tf-nightly")
_PJRT, _C_API, _LIBRARY = "PJRT_DEVICE", "NEXT_PLUGGABLE_DEVICE_USE_C_API", "TF_PLUGGABLE_DEVICE_LIBRARY_PATH"
# Of a slice: names of its hosts and addresses of its processes, separated by commas; its type; and the number of slices
# of the job.
_HOSTNAMES, _PROCESSES = "TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"
_WORKER = "TPU_WORKER_ID"
_TYPE, _SLICES = "TPU_ACCELERATOR_TYPE", "MEGASCALE_NUM_SLICES"
_VARIABLES: Final = (_PJRT, _C_API, _LIBRARY)
SLICE: Final = "slice"  # `accelerator.tpu`: the servers of all hosts of this machine's slice
REMEDY: Final = "in a separate environment: pip install '.[tpu]' in the checkout"
# For a TPU behind a TensorFlow server: the training process itself writes and reads checkpoints.
IO_DEVICE: Final = "/job:localhost"
# TensorFlow sends operations to servers ahead, and a function that runs there may then overtake an assignment.
_STREAMING: Final = "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"
_SERVERS = f"{GRPC}host-0:{SERVER_PORT},{GRPC}host-1:{SERVER_PORT}"  # an example
_TRY_SECONDS, _BETWEEN_SECONDS = 5.0, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TpuType:
    """The size of one TPU of this type.

    Attributes:
        name: as in `gcloud compute tpus tpu-vm create --accelerator-type`.
        chips: number of chips.
        replicas: number of TensorFlow devices, with one model copy each.
        hosts: number of machines.
        hbm_bytes: memory of one replica.
    """

    name: str
    chips: int
    replicas: int
    hosts: int
    hbm_bytes: int


def tpu_type(name: str) -> TpuType:
    """The type with this name.

    Raises:
        AcceleratorError: the name is unknown; the message suggests similar ones.
    """
    wanted = name.strip().lower()
    if wanted in TPU_TYPES:
        return TPU_TYPES[wanted]
    family = wanted.partition("-")[0]
    similar = [known for known in TPU_TYPES if known.partition("-")[0] == family]
    near = similar or get_close_matches(wanted, TPU_TYPES, n=_SHOWN, cutoff=0.4) or ["v5litepod-8", "v6e-8"]
    raise AcceleratorError(f"--for {name}: unknown TPU type; try {', '.join(near[:_SHOWN])}")


def _types() -> Iterator[TpuType]:
    # Family, sizes in the name, cores per chip in the name, replicas per chip, gigabytes per chip.
    families = (
        ("v2", (8, 32, 128, 256, 512), 2, 2, 16),
        ("v3", (8, 32, 64, 128, 256, 512, 1024, 2048), 2, 2, 32),
        ("v4", (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096), 2, 1, 32),
        ("v5litepod", (1, 4, 8, 16, 32, 64, 128, 256), 1, 1, 16),
        ("v5p", (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096), 2, 1, 95),
        ("v6e", (1, 4, 8, 16, 32, 64, 128, 256), 1, 1, 32),
    )
    for family, sizes, cores, replicas, gigabytes in families:
        for size in sizes:
            chips = size // cores
            # Only v5e and v6e have eight chips on one machine.
            one_host = chips <= _CHIPS_OF_A_HOST or (cores == 1 and chips == 2 * _CHIPS_OF_A_HOST)
            yield TpuType(
                name=f"{family}-{size}",
                chips=chips,
                replicas=chips * replicas,
                hosts=1 if one_host else chips // _CHIPS_OF_A_HOST,
                hbm_bytes=gigabytes * _GB // replicas,
            )


TPU_TYPES = {each.name: each for each in _types()}


def device_files() -> tuple[str, ...]:
    """Paths of the device files of TPU chips, sorted; empty if there are none."""
    return tuple(sorted(str(path) for pattern in _DEVICE_FILES for path in _DEVICES.glob(pattern)))


def tensorflow_distributions() -> tuple[str, ...]:
    """Installed packages that provide `tensorflow`. Several of them overwrite each other's files."""
    found = []
    for name in _DISTRIBUTIONS:
        try:
            version(name)
        except PackageNotFoundError:
            continue
        found.append(name)
    return tuple(found)


def library_path() -> str | None:
    """Path of the installed libtpu; None if it is not installed."""
    try:
        path = importlib.import_module("libtpu").get_library_path()
    except (ImportError, AttributeError):
        return None
    return str(path)


def announce_tpu() -> None:
    """Set the variables with which TensorFlow finds this machine's TPU, if there is one. Call before importing it.

    Variables that the user has set are kept. If something is missing, or TensorFlow is already imported, nothing is
    set; `require_local_tpu` reports that later.
    """
    if "tensorflow" in sys.modules or not device_files() or tensorflow_distributions() != ("tensorflow-tpu",):
        return
    library = library_path()
    if library is None:
        return
    for name, value in ((_PJRT, "TPU"), (_C_API, "true"), (_LIBRARY, library)):
        os.environ.setdefault(name, value)


def is_declined() -> bool:
    """Whether PJRT_DEVICE selects another device than the TPU."""
    return os.environ.get(_PJRT, "TPU").upper() != "TPU"


def looked_at() -> str:
    """Return what was checked for a TPU and found, for messages."""
    patterns = ", ".join(str(_DEVICES / pattern) for pattern in _DEVICE_FILES)
    variables = ", ".join(f"{name}={os.environ.get(name, '(not set)')}" for name in (*_VARIABLES, _HOSTNAMES, _TYPE))
    return (
        f"looked at device files {patterns}: {', '.join(device_files()) or 'none'}; environment: {variables}; "
        f"libtpu: {library_path() or 'not installed'}; TensorFlow: {', '.join(tensorflow_distributions()) or 'none'}"
    )


def require_local_tpu() -> None:
    """Check that this machine's TPU can be used, before TensorFlow tries.

    Raises:
        AcceleratorError: there is no TPU, the packages cannot use it, or TensorFlow was imported before `announce_tpu`.
    """
    if not device_files():
        raise AcceleratorError(
            f"accelerator.kind = tpu, but this machine has no TPU; {looked_at()}. Run on a TPU VM, or use kind: auto"
        )
    require_packages()
    if is_declined():
        raise AcceleratorError(
            f"accelerator.kind = tpu, but the environment has {_PJRT} = {os.environ[_PJRT]}; unset it"
        )
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise AcceleratorError(
            f"TensorFlow was imported before the variables for this machine's TPU were set ({', '.join(missing)}); "
            "start the run with baton run, or call baton.tasks.foundation.machine.tpu.announce_tpu() before "
            "importing TensorFlow"
        )


def require_packages() -> None:
    """Check that the installed packages can use a TPU.

    Raises:
        AcceleratorError: tensorflow-tpu is not the only TensorFlow installed, or libtpu is missing.
    """
    found = tensorflow_distributions()
    if len(found) > 1:
        raise AcceleratorError(
            f"{' and '.join(found)} are both installed and have overwritten each other's files; a TPU needs "
            f"tensorflow-tpu alone, {REMEDY}"
        )
    if found != ("tensorflow-tpu",):
        raise AcceleratorError(
            f"{found[0] if found else 'this TensorFlow'} cannot use a TPU; install tensorflow-tpu {REMEDY}"
        )
    if library_path() is None:
        raise AcceleratorError(f"libtpu is not installed, and TensorFlow needs it to find a TPU; install it {REMEDY}")


def require_one_host() -> None:
    """Check that this machine is not one of several hosts of a TPU slice. A machine that is no TPU VM never waits.

    Raises:
        AcceleratorError: it is; each host would wait for the others, or train alone, on its CPU.
    """
    if is_declined():
        return
    found = _signs_of_a_slice()
    if found:
        raise AcceleratorError(
            f"this machine is one of several hosts of a TPU slice ({found}), and accelerator.tpu: local is the TPU of "
            "one host; on worker 0, use accelerator.kind: tpu with accelerator.tpu: slice, the TensorFlow servers of "
            "all hosts; or use a slice of one host, such as v5litepod-8, or accelerator.kind: cpu"
        )


def require_first_worker() -> None:
    """Check that this machine is not another worker of a slice than the one that drives the servers of all hosts.

    Raises:
        AcceleratorError: it is, or its job has several slices.
    """
    if (slices := _several_slices()) and not is_declined():
        raise AcceleratorError(f"{slices}, and a TPUStrategy has the TPUs of one slice; start one run for each slice")
    number = os.environ.get(_WORKER, "")
    if not number and device_files():  # a TPU VM has it only in its metadata
        number = instance_attribute("agent-worker-number") or ""
    if number.strip() not in {"", "0"}:
        raise AcceleratorError(
            f"this machine is worker {number} of a TPU slice; baton runs on worker 0 only, whose process drives the "
            "TensorFlow servers of all hosts; run only the server here"
        )


def _names_in(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def _several_slices() -> str:
    """What says that this machine belongs to one of several slices; empty if nothing does."""
    slices = os.environ.get(_SLICES, "1")
    return "" if slices in {"", "1"} else f"{_SLICES} = {slices}"


def _signs_of_a_slice() -> str:
    """What says that this machine is one of several hosts; empty if nothing does."""
    for name, unit in ((_HOSTNAMES, "hosts"), (_PROCESSES, "processes")):
        count = len(_names_in(os.environ.get(name, "")))
        if count > 1:
            return f"{name} names {count} {unit}"
    if slices := _several_slices():
        return slices
    source, name = _TYPE, os.environ.get(_TYPE, "")
    if not name and device_files():  # a TPU VM has it only in its metadata
        source, name = "accelerator-type in the metadata", instance_attribute("accelerator-type") or ""
    known = TPU_TYPES.get(name.strip().lower())
    return f"{source} = {name}, which has {known.hosts} hosts" if known is not None and known.hosts > 1 else ""


def tpu_strategy(spec: AcceleratorSpec, *, again: bool = False) -> Any:
    """A `tf.distribute.TPUStrategy` over all cores of a TPU.

    Args:
        spec: `accelerator` of the run file; its `tpu` is `local`, or says where the servers of a slice are.
        again: whether this process had the TPU and lost it. It is then shut down first, and loses all its state.

    Raises:
        AcceleratorError: the TPU is missing, does not respond, or cannot be initialized.
        AcceleratorLost: a server did not respond within `accelerator.connect_seconds`.
    """
    import tensorflow as tf  # what only looks for a TPU needs none

    resolver = _local() if spec.tpu == "local" else _of_servers(spec)
    if again:
        with _as_accelerator_error(spec, "tf.tpu.experimental.shutdown_tpu_system"):
            tf.tpu.experimental.shutdown_tpu_system(resolver)
    if spec.tpu != "local":
        os.environ[_STREAMING] = "false"
        with _as_accelerator_error(spec, "tf.config.experimental_connect_to_cluster"):
            # The default would be a scope of this thread only: other threads would place the same operation elsewhere.
            tf.config.experimental_connect_to_cluster(resolver, make_master_device_default=False)
    with _as_accelerator_error(spec, "tf.tpu.experimental.initialize_tpu_system"):
        tf.tpu.experimental.initialize_tpu_system(resolver)
    with _as_accelerator_error(spec, "tf.distribute.TPUStrategy"):
        return tf.distribute.TPUStrategy(resolver)


def _local() -> Any:
    import tensorflow as tf

    require_one_host()
    require_local_tpu()
    with _as_accelerator_error(AcceleratorSpec(kind="tpu"), "tf.distribute.cluster_resolver.TPUClusterResolver"):
        return tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")


def _of_servers(spec: AcceleratorSpec) -> Any:
    """The resolver of the TensorFlow servers of a slice, all of which listen."""
    import tensorflow as tf

    require_packages()
    name = _name_of(spec)
    # Without a metadata server, TensorFlow would look for one without a time limit.
    if not name.startswith(GRPC) and metadata_address() is None:
        raise AcceleratorError(
            f"accelerator.tpu = {spec.tpu}: this machine is not on Google Cloud, which knows TPUs by name; give the "
            f"addresses of their servers, {_SERVERS}, or accelerator.tpu: local"
        )
    with _as_accelerator_error(spec, "tf.distribute.cluster_resolver.TPUClusterResolver"):
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=name)
        if "[" in name:  # TensorFlow cuts an address at its first colon
            spec_of_servers = tf.train.ClusterSpec({resolver.task_type: name.replace(GRPC, "").split(",")})
            resolver.cluster_spec = lambda: spec_of_servers
        workers = list(resolver.cluster_spec().job_tasks(resolver.task_type))
    _wait_for(workers, spec, lambda _: None)
    return resolver


def wait_for_servers(spec: AcceleratorSpec, note: Callable[[str], None]) -> None:
    """Wait until the TensorFlow servers of a slice listen. Where those of a TPU's name are, only TensorFlow finds out.

    Args:
        spec: `accelerator` of the run file.
        note: told of each server that is waited for.

    Raises:
        AcceleratorError: the hosts of this machine's slice are not known.
        AcceleratorLost: a server did not respond within `accelerator.connect_seconds`.
    """
    name = _name_of(spec)
    if name.startswith(GRPC):
        _wait_for([each.removeprefix(GRPC) for each in name.split(",")], spec, note)


def _wait_for(workers: Iterable[str], spec: AcceleratorSpec, note: Callable[[str], None]) -> None:
    until = time.monotonic() + spec.connect_seconds
    for worker in workers:
        if fault := _no_server_at(worker):
            note(f"waiting for the TensorFlow server at {worker}, up to {spec.connect_seconds:g} s in all: {fault}")
        while fault:
            if time.monotonic() > until:
                raise AcceleratorLost(
                    f"accelerator.tpu = {spec.tpu}: no TensorFlow server responds at {worker} ({fault}) within "
                    f"{spec.connect_seconds:g} s (accelerator.connect_seconds); start baton slice-server on each host "
                    "where Google's server does not run, or use accelerator.tpu: local for the TPU of one host"
                )
            time.sleep(_BETWEEN_SECONDS)
            fault = _no_server_at(worker)


def _name_of(spec: AcceleratorSpec) -> str:
    """`accelerator.tpu`, with the addresses of the servers in place of `slice`, each with its port."""
    if spec.tpu.startswith(GRPC):
        return _servers_at(each.removeprefix(GRPC) for each in spec.tpu.split(","))
    if spec.tpu != SLICE:
        return spec.tpu
    named, metadata = _names_in(os.environ.get(_HOSTNAMES, "")), "worker-network-endpoints"
    # As JAX: the third part is the host.
    hosts = named or [each.split(":", 2)[-1] for each in _names_in(instance_attribute(metadata) or "")]
    if not hosts:
        raise AcceleratorError(
            f"accelerator.tpu = {SLICE}, but neither {_HOSTNAMES} nor this machine's metadata names the hosts of a "
            f"slice; run on its worker 0, or name the servers, {_SERVERS}"
        )
    try:
        return _servers_at(hosts)
    except ValueError as fault:
        raise AcceleratorError(
            f"accelerator.tpu = {SLICE}: {_HOSTNAMES if named else f'{metadata} in the metadata'} names the hosts "
            f"{', '.join(hosts)}: {fault}; or name the servers, {_SERVERS}"
        ) from None


def _servers_at(addresses: Iterable[str]) -> str:
    return ",".join(f"{GRPC}{canonical_address(each, SERVER_PORT)}" for each in addresses)


def servers_of(strategy: Any) -> tuple[str, ...]:
    """The servers of a strategy as TensorFlow names them, `/job:worker/replica:0/task:0`, sorted."""
    return tuple(sorted({device.partition("/device:")[0] for device in strategy.extended.worker_devices}))


def _no_server_at(worker: str) -> str:
    """Why nothing listens at an address, HOST:PORT; empty if something does."""
    try:
        socket.create_connection(split_address(worker, SERVER_PORT), timeout=_TRY_SECONDS).close()
    except OSError as fault:
        return str(fault)
    return ""


def serve(port: int, ready: Callable[[], None]) -> None:
    """Run the TensorFlow server of this host of a slice, until a signal ends the process.

    It obeys every client that reaches its port, as Google's does: only the network of the slice may.

    Args:
        port: on all interfaces; the clients find the server at it.
        ready: called when the server listens.

    Raises:
        AcceleratorError: this machine's TPU cannot be used, or the port is not free.
    """
    announce_tpu()
    require_local_tpu()
    import tensorflow as tf

    # The client tells each server which others there are.
    try:
        server = tf.distribute.Server({"worker": [f"localhost:{port}"]}, job_name="worker", task_index=0)
    except tf.errors.OpError as fault:
        raise AcceleratorError(
            f"the TensorFlow server cannot listen at port {port}: {fault.message}; on a TPU VM, Google's server may "
            "have it already, and is enough"
        ) from fault
    ready()
    while server:
        # Told of a client, the server replaces Python's handler and drops the signal (TensorFlow 2.19).
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        time.sleep(_BETWEEN_SECONDS)  # `server.join` would not let Python handle it


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
    import tensorflow as tf

    try:
        return ", ".join(device.name for device in tf.config.list_logical_devices()) or "none"
    except (RuntimeError, tf.errors.OpError) as fault:
        return f"unavailable ({type(fault).__name__})"
