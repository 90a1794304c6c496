"""The hosts of a run as this process's environment names them: their addresses, and which of them this host is.

`TF_CONFIG` says it in TensorFlow's words. Where it is not set, what started the process says it in its own: Vertex AI
in `CLUSTER_SPEC`, SkyPilot in `SKYPILOT_NODE_IPS`, Slurm in `SLURM_STEP_NODELIST`; and the author of a job, such as
one of Kubernetes, in `BATON_HOSTS`. Only variables are read: no network is used, and no command is run.

Needs no TensorFlow, so that a command knows before it imports TensorFlow whether it is the chief, host 0.
"""

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from baton.tasks.foundation.contracts.placement import AcceleratorSpec, canonical_address
from baton.tasks.foundation.errors import AcceleratorError

_EXAMPLE = (
    '{"cluster": {"worker": ["host-0:2222", "host-1:2222"]}, "task": {"type": "worker", "index": 0}}, where index '
    "differs on each host"
)
_PORT: Final = 2222
_MOST_HOSTS: Final = 10_000
_TF_CONFIG, _CLUSTER_SPEC = "TF_CONFIG", "CLUSTER_SPEC"
# The jobs of each: the one with the chief, and the one with the other workers.
_JOBS: Final = {_TF_CONFIG: ("chief", "worker"), _CLUSTER_SPEC: ("workerpool0", "workerpool1")}
# Kubernetes sets it in the pods of an indexed job.
_INDICES: Final = ("JOB_COMPLETION_INDEX", "SKYPILOT_NODE_RANK", "SLURM_NODEID")
# Lists of hosts, the first that is set counts; and the variables that may have the index of this host.
_LISTS: Final = {
    "BATON_HOSTS": _INDICES,
    "SKYPILOT_NODE_IPS": ("SKYPILOT_NODE_RANK",),
    "SLURM_STEP_NODELIST": ("SLURM_NODEID",),
    "SLURM_JOB_NODELIST": ("SLURM_NODEID",),
}
# How many processes srun starts. Without a step, how many it will start unless its options say otherwise.
_TASKS: Final = {"SLURM_STEP_NODELIST": "SLURM_STEP_NUM_TASKS", "SLURM_JOB_NODELIST": "SLURM_NTASKS"}
_NAME: Final = re.compile(r"(?:[^\s,\[\]]|\[[^\s\[\]]*\])+")
_RANGE: Final = re.compile(r"([0-9]+)(?:-([0-9]+))?")


@dataclass(frozen=True, slots=True)
class Cluster:
    """The hosts of a run.

    Attributes:
        addresses: host:port of every worker, the chief's first.
        host: index of this process in `addresses`.
        source: the environment variable that lists the hosts.
    """

    addresses: tuple[str, ...]
    host: int
    source: str = field(default=_TF_CONFIG, compare=False)

    def tf_config(self) -> dict[str, Any]:
        """The content of a `TF_CONFIG` that says the same: workers only, the first of which is the chief."""
        return {"cluster": {"worker": list(self.addresses)}, "task": {"type": "worker", "index": self.host}}


def cluster_of(environment: Mapping[str, str]) -> Cluster:
    """Read which hosts train the run, and which of them this is.

    Raises:
        AcceleratorError: no variable says it, or what it says is not a cluster of workers that includes this process.
    """
    for name in _JOBS:
        if environment.get(name):
            return _of_jobs(environment, name)
    for name in _LISTS:
        if environment.get(name):
            return _of_list(environment, name)
    raise AcceleratorError(
        f"accelerator.kind = multi_worker needs TF_CONFIG in the environment; set it to {_EXAMPLE}; or start the hosts "
        "with Slurm, JobSet, SkyPilot or Vertex AI, as deploy/hosts.md says"
    )


def is_chief(spec: AcceleratorSpec, environment: Mapping[str, str]) -> bool:
    """Whether this process writes to the run's home; for arguments and errors see `several_hosts`."""
    cluster = several_hosts(spec, environment)
    return cluster is None or cluster.host == 0


def several_hosts(spec: AcceleratorSpec, environment: Mapping[str, str]) -> Cluster | None:
    """The hosts that train a run together; None for a single one.

    Args:
        spec: `accelerator` of the run file.

    Raises:
        AcceleratorError: see `cluster_of`.
    """
    cluster = cluster_of(environment) if spec.kind == "multi_worker" else None
    return None if cluster is None or len(cluster.addresses) == 1 else cluster


def _of_jobs(environment: Mapping[str, str], name: str) -> Cluster:
    """The cluster in `TF_CONFIG`, or in `CLUSTER_SPEC`, which has the same form and other names of jobs."""
    text = environment[name]
    try:
        config = json.loads(text)
        cluster, task = dict(config["cluster"]), dict(config["task"])
        kind, index = str(task["type"]), int(task["index"])
        jobs = {job: [str(address) for address in addresses] for job, addresses in cluster.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as fault:
        raise AcceleratorError(
            f"{name} = {text[:200]} cannot be read ({type(fault).__name__}: {fault}); set TF_CONFIG to {_EXAMPLE}"
        ) from fault
    of_chief, of_workers = _JOBS[name]
    others = sorted(jobs.keys() - {of_chief, of_workers})
    if others:
        raise AcceleratorError(
            f"{name} has jobs {', '.join(others)}; use only {of_workers}, and at most one {of_chief}"
        )
    chiefs, workers = jobs.get(of_chief, []), jobs.get(of_workers, [])
    if len(chiefs) > 1:
        raise AcceleratorError(
            f"{name} has {len(chiefs)} chiefs in job {of_chief}; name at most one (without one, worker 0 is the chief)"
        )
    if not 0 <= index < len(jobs.get(kind, [])):
        raise AcceleratorError(
            f"{name} makes this process {kind} {index}, but lists {len(jobs.get(kind, []))} of that type; "
            "give each host a different index, from 0"
        )
    host = index if kind == of_chief else len(chiefs) + index
    try:
        addresses = tuple(map(canonical_address, (*chiefs, *workers)))
    except ValueError as fault:
        raise AcceleratorError(f"{name}: {fault}; set TF_CONFIG to {_EXAMPLE}") from None
    return _checked(Cluster(addresses=addresses, host=host, source=name))


def _of_list(environment: Mapping[str, str], name: str) -> Cluster:
    """The cluster in a list of hosts."""
    text = environment[name]
    try:
        hosts = [canonical_address(each, _PORT) for each in host_names(text)]
    except ValueError as fault:
        raise AcceleratorError(
            f"{name} = {text[:200]}: {fault}; set it to names such as host-0,host-1 or host-[0-3], each with :port if "
            f"that is not {_PORT}, or set TF_CONFIG"
        ) from fault
    tasks = environment.get(_TASKS.get(name, ""), str(len(hosts)))
    if tasks != str(len(hosts)):
        raise AcceleratorError(
            f"{_TASKS[name]} = {tasks}, and {name} has {len(hosts)} nodes: accelerator.kind = multi_worker is one "
            "process on each node, with all its devices; set --ntasks-per-node=1"
        )
    found = next((variable for variable in _LISTS[name] if environment.get(variable)), None)
    if found is None:
        raise AcceleratorError(
            f"{name} names {len(hosts)} hosts, and {' or '.join(_LISTS[name])} is not set, which says which of them "
            "this is; start the command with srun, or in another job that sets it"
        )
    try:
        host = int(environment[found])
    except ValueError:
        host = -1
    if not 0 <= host < len(hosts):
        raise AcceleratorError(
            f"{found} = {environment[found]}, and {name} names {len(hosts)} hosts; give each host a different index, "
            f"from 0 to {len(hosts) - 1}"
        )
    return _checked(Cluster(addresses=tuple(hosts), host=host, source=name))


def _checked(cluster: Cluster) -> Cluster:
    if len(set(cluster.addresses)) != len(cluster.addresses):
        raise AcceleratorError(
            f"{cluster.source} names an address twice: {', '.join(cluster.addresses)}; give each worker a different "
            "address"
        )
    return cluster


def host_names(text: str) -> list[str]:
    """Expand names as Slurm writes them: `rack[1-2]-n[08-10,12],login` are nine, in the order that Slurm counts them.

    Args:
        text: names between commas or white space, each with any number of lists of numbers in brackets. A range counts
            with as many digits as its first number has. Brackets around an IPv6 address stay.

    Raises:
        ValueError: it is not such a text, or names more than 10,000 hosts.
    """
    if re.sub(r"[\s,]", "", _NAME.sub("", text)):
        raise ValueError("its brackets do not match")
    names: list[str] = []
    for name in _NAME.findall(text):
        pieces = re.split(r"\[(.*?)\]", name)  # every other one was in brackets
        choices = [_numbers(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        if len(names) + math.prod(map(len, choices)) > _MOST_HOSTS:
            raise ValueError(f"more than {_MOST_HOSTS} hosts")
        names += map("".join, itertools.product(*choices))
    if not names:
        raise ValueError("no host")
    return names


def _numbers(text: str) -> Sequence[str]:
    """The numbers of `08-10,12`, as they are written."""
    if ":" in text:
        return [f"[{text}]"]
    found: list[str] = []
    for each in text.split(","):
        match = _RANGE.fullmatch(each)
        if match is None:
            raise ValueError(f"[{text}] is not a list of numbers and ranges")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= _MOST_HOSTS:
            raise ValueError(f"[{text}] has a range that ends before it begins, or more than {_MOST_HOSTS} hosts")
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return found
