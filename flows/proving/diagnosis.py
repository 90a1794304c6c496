"""The usual causes of a difference between two trainings of one run file, with their remedies."""


def causes_of(
    *, same_examples: bool, repeatable: bool | None, operations: str, source: str, same_step: bool = True
) -> tuple[str, ...]:
    """Return the causes that fit the findings, the likeliest first.

    Args:
        same_examples: whether both trials prepared the same examples in the same order.
        repeatable: whether two straight trials agree; None if only one was made.
        operations: the model and its operations that keep state outside the checkpoint, as in `TrialReport`; may be
            empty.
        source: `data.source`.
        same_step: whether all processes traced the same train step.
    """
    causes = []
    if not same_examples:
        causes.append(
            f"{source} gave other examples, or the same ones in another order, on its second call. Usual causes: "
            "shuffling or drawing without a seed, the order of a set, an unsorted folder listing, threads, the time. "
            "Return the same order each time; Baton shuffles by train.seed"
        )
    if not same_step:
        causes.append(
            "the processes traced different train steps from the same code: the model's Python code reads something "
            "that changes while the step is traced, such as the time, a random number, a counter, a file or the order "
            "of a set. Make it a constant or a variable"
        )
    if operations:
        causes.append(
            f"{operations} draw from TensorFlow's own random state or run Python code, and checkpoints hold neither "
            "state. Use keras.random with a SeedGenerator in a layer, or tf.random.Generator; keep what Python code "
            "remembers in variables"
        )
    if repeatable is False and same_step:
        causes.append(
            "two uninterrupted trainings differ too, so cuts are not the cause: the model is not repeatable. Usual "
            "causes: unseeded random numbers of Python or NumPy in the model's code, the order of a set, or an "
            "operation that is not deterministic (leave train.deterministic at true; then try --set "
            "accelerator.intra_op_threads=1 and --set accelerator.inter_op_threads=1)"
        )
    elif repeatable and not operations and same_step:
        causes.append(
            "two uninterrupted trainings agree, so state is lost at the cut because no checkpoint holds it. Usual "
            "causes: a counter or a cache in Python, such as an attribute of a layer or a callback; a stateful tf.data "
            "map; a lookup table. Keep it in a variable (add_weight, or a tf.Variable of a layer)"
        )
    return tuple(causes)
