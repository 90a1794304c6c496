"""Finds the operations of a traced function whose state no checkpoint holds."""

from typing import Any

from tasks.foundation.errors import ModelError
from tasks.foundation.messages import message
from tasks.foundation.model.step_draws import StepDraws

# Kernels that draw from TensorFlow's own random state.
RANDOM_KERNELS = frozenset(
    {
        "AllCandidateSampler",
        "FixedUnigramCandidateSampler",
        "LearnedUnigramCandidateSampler",
        "LogUniformCandidateSampler",
        "Multinomial",
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "SampleDistortedBoundingBox",
        "SampleDistortedBoundingBoxV2",
        "ThreadUnsafeUnigramCandidateSampler",
        "TruncatedNormal",
        "UniformCandidateSampler",
    }
)
# Kernels that run Python code.
PYTHON_KERNELS = frozenset({"EagerPyFunc", "PyFunc"})
CLOCK = "baton_clock"

_REMEDIES = (
    "use a function of tf.random with the same distribution, which Baton makes a function of the step",
    "or draw with a keras.random.SeedGenerator or tf.random.Generator that a layer or the model holds",
)


def nodes_of(function: Any) -> list[Any]:
    """The nodes of a concrete function, with those of the functions that it calls."""
    graph = function.graph.as_graph_def()
    return [*graph.node, *(node for inner in graph.library.function for node in inner.node_def)]


def stateful_operations(function: Any) -> tuple[str, ...]:
    """Names of operations in a concrete function whose state no checkpoint holds: random ones, and Python code."""
    kinds = RANDOM_KERNELS | PYTHON_KERNELS
    return tuple(sorted({node.name for node in nodes_of(function) if node.op in kinds and CLOCK not in node.name}))


def require_exact_draws(function: Any, draws: StepDraws | None, what: str) -> None:
    """Refuse random operations that draw from TensorFlow's own state, before a run starts with them.

    Args:
        function: a traced step, a concrete function.
        draws: knows the user's lines.
        what: completes "... draws from TensorFlow's own state", for the message.

    Raises:
        ModelError: names the operations, and their lines where they are known.
    """
    left = sorted({(node.op, node.name) for node in nodes_of(function) if node.op in RANDOM_KERNELS})
    if not left or draws is None:
        return
    kept = {each.name: str(each) for each in draws.kept}
    details = list(dict.fromkeys(kept.get(op, f"{op} ({name} in the graph)") for op, name in left))
    raise ModelError(
        message(
            f"{what} draws random numbers from TensorFlow's own state, which no checkpoint holds, so a resumed run "
            "would differ",
            details=details,
            hints=_REMEDIES,
        )
    )
