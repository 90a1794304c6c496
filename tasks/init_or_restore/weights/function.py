"""`weights.py:load`: the user's own function, which returns arrays by the paths of variables."""

from collections.abc import Mapping
from pathlib import Path

from tasks.foundation.errors import ModelError, WeightsError
from tasks.foundation.model.isolated_build import undisturbed
from tasks.foundation.seeding import seed_for_reading
from tasks.foundation.user_code import describe, load_function
from tasks.init_or_restore.weights.source_variables import Contents, Held, as_array


def call_function(reference: str, code_folder: Path, *, seed: int = 0) -> Contents:
    """Call the function, without arguments.

    Args:
        reference: `weights.py:load` or `package.module:load`.
        code_folder: the run file's folder.
        seed: `train.seed`, from which what module and function draw follows.

    Raises:
        WeightsError: there is none, it raises, or returns something else than a mapping of names to arrays.
    """
    where = f"init.weights: {reference}"
    remedy = "return a dict of arrays by the paths of variables, {'dense/kernel': …}"
    try:
        function = load_function(reference, code_folder, seed=seed)
    except ModelError as fault:
        raise WeightsError(f"init.weights: {fault}") from fault
    try:
        with undisturbed():
            seed_for_reading(reference.partition(":")[0], code_folder, seed)
            values = function()
    except (Exception, SystemExit) as fault:
        raise WeightsError(f"{where} raised {describe(fault)}") from fault
    if not isinstance(values, Mapping):
        raise WeightsError(f"{where} returned {type(values).__name__}; {remedy}")
    found = []
    for name, value in values.items():
        array = as_array(value)
        if not isinstance(name, str) or array.dtype.kind in "OSU":
            raise WeightsError(f"{where} returned {name!r}: {type(value).__name__}; {remedy}")
        found.append(Held((name,), array))
    return Contents(variables=tuple(found), ignored=0, place=reference)
