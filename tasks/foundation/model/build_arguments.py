"""The arguments of the user's build function: `model.options`, and the run's length if the function asks for it.

Learning-rate schedules often depend on the steps of an epoch or of the whole run. A build function that has a
parameter named `steps_per_epoch` or `train_steps` gets them. They are recorded with `model.options`, so a run whose
schedule would change with another target is refused, as for any other change of these arguments.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.user_code import load_function

_LENGTHS: Mapping[str, Callable[[RunSpec], int]] = {
    "steps_per_epoch": lambda spec: spec.train.epoch.steps,
    "train_steps": lambda spec: spec.train.target,
}
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def build_arguments(spec: RunSpec, function: Callable[..., object]) -> dict[str, Any]:
    """Return the keyword arguments to call the user's build function with.

    Args:
        spec: the run file, with the number of training examples if the function asks for what depends on it.
        function: the user's.

    Returns:
        `model.options`, and `steps_per_epoch` (rounded up) and `train_steps` (the target) where the function has a
        parameter of that name and the options do not set it.
    """
    lengths = {name: _LENGTHS[name](spec) for name in lengths_asked_for(spec, function)}
    return {**spec.model.options, **lengths}


def lengths_asked_for(spec: RunSpec, function: Callable[..., object]) -> tuple[str, ...]:
    """Return the names of the lengths that the build function has a parameter for, and that no option sets."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables of C have none
        return ()
    return tuple(
        name
        for name in _LENGTHS
        if name in parameters and parameters[name].kind in _BY_NAME and name not in spec.model.options
    )


def asks_for_unknown_length(spec: RunSpec, code_folder: Path) -> bool:
    """Return whether the model cannot be built before the number of training examples is known. Imports user code.

    Raises:
        ModelError: the function cannot be loaded.
    """
    if spec.train.epoch_examples is not None:
        return False
    asked = lengths_asked_for(spec, load_function(spec.model.build, code_folder, seed=spec.train.seed))
    return "steps_per_epoch" in asked or ("train_steps" in asked and spec.train.known_target is None)


def recorded_arguments(spec: RunSpec, code_folder: Path) -> dict[str, Any]:
    """Return `build_arguments` of the function that the run file names, for the run's identity.

    Raises:
        ModelError: the function cannot be loaded.
    """
    return build_arguments(spec, load_function(spec.model.build, code_folder, seed=spec.train.seed))
