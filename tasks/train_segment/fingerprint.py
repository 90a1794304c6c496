"""A fingerprint of the traced step; it shows that another process traced another step.

Python code in a model runs while its step is traced. Values that it reads, such as the time, a counter or a file,
become part of the step. So a process that resumes the run may trace another step without an error.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tasks.foundation.contracts.log_entry import Commit, Environment
from tasks.foundation.contracts.segment import TracedStep
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.telemetry.events import Note, Sink

# Attributes with names and counters of a process, and those that only placement and debugging use.
_NOT_COMPUTED = frozenset(
    {
        "_class",
        "_gradient_op_type",
        "_user_specified_name",
        "config",
        "config_proto",
        "container",
        "executor_type",
        "shared_name",
        "token",
    }
)
_NUMBER = re.compile(rb"\d+")
# TensorFlow's constant of a replica's number, which differs between hosts that trace the same step.
_REPLICA_NUMBER = re.compile(r"(^|/)replica_id_in_sync_group(_\d+)?$")
_DIGITS = 32
# Number of log entries to read back for a commit of another process.
_MAX_ENTRIES = 16


def traced_step(
    function: Any, *, environment: Environment, identity: dict[str, Any], draws_exactly: bool = False
) -> TracedStep:
    """Compute the fingerprint of a concrete function, and a digest of the environment and identity it was traced for.

    Args:
        function: the traced loop.
        environment: this process's.
        identity: the run's, as in its log.
        draws_exactly: whether random operations were made functions of the step.
    """
    # Thread counts do not influence tracing.
    kept = environment.model_dump(exclude={"intra_op_threads", "inter_op_threads"})
    circumstances = json.dumps([kept, identity], sort_keys=True, default=str).encode()
    return TracedStep(
        fingerprint=fingerprint(function.graph.as_graph_def()),
        circumstances=hashlib.sha256(circumstances).hexdigest()[:_DIGITS],
        draws_exactly=draws_exactly,
    )


def fingerprint(graph: Any) -> str:
    """The sha256 of what a `GraphDef` computes; equal in two processes that trace the same code.

    Functions and nodes are identified by operation and position. Their names are ignored, because these contain
    counters of the process.
    """
    library = {each.signature.name: each for each in graph.library.function}
    return _Digests(library).of_nodes(graph.node, arguments=(), results=())[:_DIGITS]


def warn_if_step_differs(log: RunLog, number: int, traced: TracedStep, *, telemetry: Sink) -> None:
    """Warn if the newest commit with the same environment and identity was trained with another step.

    A commit of an earlier version, whose random operations drew from TensorFlow's own state, is reported as such.

    Args:
        log: the run's.
        number: the log entry to start with, reading backwards.
        traced: the step that this process traced.
        telemetry: receives the warning.
    """
    for earlier in range(number, max(number - _MAX_ENTRIES, -1), -1):
        body = log.entry(earlier).body
        if not isinstance(body, Commit) or body.traced is None:
            continue
        if body.traced.draws_exactly is None and traced.draws_exactly:
            telemetry.emit(
                Note(
                    text=f"from step {body.checkpoint.step} on, the random operations of the train step draw as "
                    "functions of train.seed, step and replica; before, they drew from TensorFlow's own state, which "
                    "no checkpoint holds",
                    warning=True,
                )
            )
            return
        if body.traced.circumstances != traced.circumstances:
            continue
        if body.traced.fingerprint != traced.fingerprint:
            telemetry.emit(
                Note(
                    text=f"this process traced another train step than the one that committed step "
                    f"{body.checkpoint.step}, from the same code and settings: the run can differ from an "
                    "uninterrupted one. Python code of the model reads something that changes while the step is "
                    "traced, such as the time, a random number, a counter or a file; make it a constant or a variable",
                    warning=True,
                )
            )
        return


class _Digests:
    """Digests of the functions of a graph; each is computed once."""

    def __init__(self, library: dict[str, Any]) -> None:
        self._library = library
        self._known: dict[str, str] = {}

    def of_nodes(self, nodes: Sequence[Any], *, arguments: Iterable[str], results: Iterable[str]) -> str:
        """Digest of a body: its nodes in order, with their inputs by position, then its results."""
        positions = {name: f"a{index}" for index, name in enumerate(arguments)}
        positions |= {node.name: f"n{index}" for index, node in enumerate(nodes)}
        digest = hashlib.sha256()
        for node in nodes:
            op = self._function(node.op) if node.op in self._library else node.op
            digest.update(f"\n{op} {_device(node.device)}".encode())
            # Control inputs have no order.
            reads = [_by_position(read, positions) for read in node.input]
            waits = sorted(read for read in reads if read.startswith("^"))
            digest.update(" ".join([*(read for read in reads if not read.startswith("^")), *waits]).encode())
            for key in sorted(node.attr):
                if key not in _NOT_COMPUTED and not (key == "value" and _REPLICA_NUMBER.search(node.name)):
                    digest.update(f"\n{key}=".encode() + self._value(node.attr[key]))
        digest.update("\n".join(_by_position(each, positions) for each in results).encode())
        return digest.hexdigest()

    def _function(self, name: str) -> str:
        if name not in self._library:
            return "?"
        if name not in self._known:
            self._known[name] = "itself"
            function = self._library[name]
            self._known[name] = self.of_nodes(
                function.node_def,
                arguments=[argument.name for argument in function.signature.input_arg],
                results=[function.ret[output.name] for output in function.signature.output_arg],
            )
        return self._known[name]

    def _value(self, value: Any) -> bytes:
        if value.HasField("func"):
            return self._function(value.func.name).encode()
        if value.HasField("list") and value.list.func:
            return " ".join(self._function(each.name) for each in value.list.func).encode()
        if value.HasField("tensor") and value.tensor.dtype == tf.string.as_datatype_enum:
            # Assertion messages contain node names.
            return b" ".join(_NUMBER.sub(b"#", text) for text in value.tensor.string_val)
        return bytes(value.SerializeToString(deterministic=True))


def _by_position(read: str, positions: dict[str, str]) -> str:
    """An input, such as `a/b:1`, `^a/b`, or `a/b:output:0` in a function, by the position of its node."""
    mark = "^" if read.startswith("^") else ""
    name, colon, output = read.removeprefix("^").partition(":")
    return f"{mark}{positions.get(name, '?')}{colon}{output}"


def _device(name: str) -> str:
    """A device name without the part that identifies the process."""
    return name[name.find("/device:") :] if "/device:" in name else ""
