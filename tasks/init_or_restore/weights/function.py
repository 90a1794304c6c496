"""`weights.py:load`: a user's function that returns arrays by variable path."""

from collections.abc import Mapping
from pathlib import Path

from tasks.foundation.errors import ModelError, WeightsError
from tasks.foundation.model.build import preserved_global_state
from tasks.foundation.seeding import seed_as_after_import
from tasks.foundation.user_code import load_function
from tasks.foundation.user_errors import user_error
from tasks.init_or_restore.weights.matching import SourceContents, SourceVariable, as_array


def call_weights_function(reference: str, code_folder: Path, *, seed: int = 0) -> SourceContents:
    """Call the user's function, without arguments.

    Args:
        reference: `weights.py:load` or `package.module:load`.
        code_folder: the run file's folder.
        seed: `train.seed`; random numbers that module and function draw derive from it.

    Raises:
        WeightsError: there is no such function, it raises, or does not return a mapping from names to arrays.
    """
    where = f"init.weights: {reference}"
    remedy = "return a dict of arrays by variable path, such as {'dense/kernel': …}"
    try:
        function = load_function(reference, code_folder, seed=seed, key="init.weights")
    except ModelError as fault:
        raise WeightsError(str(fault)) from fault
    try:
        with preserved_global_state():
            seed_as_after_import(reference.partition(":")[0], code_folder, seed)
            values = function()
    except (Exception, SystemExit) as fault:
        raise WeightsError(user_error(f"{where} raised", fault)) from fault
    if not isinstance(values, Mapping):
        raise WeightsError(f"{where} returned {type(values).__name__}; {remedy}")
    found = []
    for name, value in values.items():
        array = as_array(value)
        if not isinstance(name, str) or array.dtype.kind in "OSU":
            raise WeightsError(f"{where} returned {name!r}: {type(value).__name__}; {remedy}")
        found.append(SourceVariable((name,), array))
    return SourceContents(variables=tuple(found), ignored=0, place=reference)
