"""What usually causes that two trainings of one run file differ. Sentences with their remedies."""

import re

# The trainer's warning of operations whose state no checkpoint holds.
_STATEFUL_OPS = re.compile(r"^warning: (.*) draw from TensorFlow's own random state", re.MULTILINE)


def stateful_ops_told(stderr: str) -> str | None:
    """Model and operations that the trainer warned of, `model.py:build_model: normal/RandomStandardNormal`."""
    told = _STATEFUL_OPS.search(stderr)
    return None if told is None else told[1]


def causes_of(
    *, same_examples: bool, repeatable: bool | None, ops: str | None, source: str, same_step: bool = True
) -> tuple[str, ...]:
    """The causes, likeliest first.

    Args:
        same_examples: whether both trials prepared the same examples in the same order.
        repeatable: whether two straight trials agree; None if that was not asked.
        ops: see `stateful_ops_told`.
        source: `data.source`.
        same_step: whether all processes traced the same train step.
    """
    causes = []
    if not same_examples:
        causes.append(
            f"{source} gave other examples, or the same ones in another order, when it was called again. Usual causes: "
            "shuffling or drawing without a seed, the order of a set, a folder listed unsorted, threads, the time. "
            "Give them in one order each time: Baton itself shuffles, by train.seed"
        )
    if not same_step:
        causes.append(
            "the processes traced different train steps from the same code: Python code of the model reads something "
            "that changes while the step is traced, such as the time, a random number, a counter, a file or the order "
            "of a set. Make it a constant or a variable"
        )
    if ops is not None:
        causes.append(
            f"{ops} draw from TensorFlow's own random state, or run Python code, and no checkpoint holds the state of "
            "either. Draw with keras.random and a SeedGenerator that a layer keeps, or with tf.random.Generator; keep "
            "what Python code remembers in variables"
        )
    if repeatable is False and same_step:
        causes.append(
            "two uninterrupted trainings differ as well, so this is not about cuts: the model is not repeatable. Usual "
            "causes: random numbers of Python or NumPy without a seed in the model's code, the order of a set, or an "
            "operation that is not deterministic (leave train.deterministic at true; then try --set "
            "accelerator.intra_op_threads=1 and --set accelerator.inter_op_threads=1)"
        )
    elif repeatable and ops is None and same_step:
        causes.append(
            "two uninterrupted trainings agree, so something is lost at the cut: state that no checkpoint holds. Usual "
            "causes: a counter or a cache that Python keeps, such as an attribute of a layer or a callback; a "
            "stateful tf.data map; a lookup table. Keep it in a variable (add_weight, or a tf.Variable of a layer)"
        )
    return tuple(causes)
