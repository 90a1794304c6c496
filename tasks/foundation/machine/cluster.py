"""The hosts of a run as its environment names them: their addresses, and which of them this process is.

Needs no TensorFlow, so that a command knows before it imports TensorFlow whether it is the chief, worker 0.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from tasks.foundation.contracts.placement import AcceleratorSpec
from tasks.foundation.errors import AcceleratorError

_EXAMPLE = (
    '{"cluster": {"worker": ["host-0:2222", "host-1:2222"]}, "task": {"type": "worker", "index": 0}}, where index '
    "differs on each host"
)


@dataclass(frozen=True, slots=True)
class Cluster:
    """The content of `TF_CONFIG`.

    Attributes:
        addresses: host:port of every worker, the chief's first.
        host: index of this process in `addresses`.
    """

    addresses: tuple[str, ...]
    host: int


def cluster_of(environment: Mapping[str, str]) -> Cluster:
    """Read `TF_CONFIG`.

    Args:
        environment: the process's environment variables.

    Raises:
        AcceleratorError: it is not set, or is not a cluster of workers that includes this process.
    """
    text = environment.get("TF_CONFIG")
    if not text:
        raise AcceleratorError(
            f"accelerator.kind = multi_worker needs TF_CONFIG in the environment; set it to {_EXAMPLE}"
        )
    try:
        config = json.loads(text)
        cluster, task = dict(config["cluster"]), dict(config["task"])
        kind, index = str(task["type"]), int(task["index"])
        jobs = {name: [str(address) for address in addresses] for name, addresses in cluster.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as fault:
        raise AcceleratorError(
            f"TF_CONFIG = {text[:200]} cannot be read ({type(fault).__name__}: {fault}); set it to {_EXAMPLE}"
        ) from fault
    others = sorted(jobs.keys() - {"chief", "worker"})
    if others:
        raise AcceleratorError(f"TF_CONFIG has jobs {', '.join(others)}; use only workers and at most one chief")
    if len(jobs.get("chief", [])) > 1:
        raise AcceleratorError(
            f"TF_CONFIG has {len(jobs['chief'])} chiefs; name at most one (without one, worker 0 is the chief)"
        )
    if not 0 <= index < len(jobs.get(kind, [])):
        raise AcceleratorError(
            f"TF_CONFIG makes this process {kind} {index}, but lists {len(jobs.get(kind, []))} of that type; "
            "give each host a different index, from 0"
        )
    chiefs, workers = jobs.get("chief", []), jobs.get("worker", [])
    addresses = (*chiefs, *workers)
    if len(set(addresses)) != len(addresses):
        raise AcceleratorError(
            f"TF_CONFIG names an address twice: {', '.join(addresses)}; give each worker a different address"
        )
    return Cluster(addresses=addresses, host=index if kind == "chief" else len(chiefs) + index)


def is_chief(spec: AcceleratorSpec, environment: Mapping[str, str]) -> bool:
    """Whether this process writes to the run's home. Needs no TensorFlow.

    Args:
        spec: `accelerator` of the run file.
        environment: the process's environment variables.

    Raises:
        AcceleratorError: see `cluster_of`.
    """
    return spec.kind != "multi_worker" or cluster_of(environment).host == 0
