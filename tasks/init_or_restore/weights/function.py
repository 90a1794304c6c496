"""`weights.py:load`: the user's own function, which returns arrays by the paths of variables."""

from collections.abc import Mapping
from pathlib import Path

from tasks.foundation.errors import ModelError, WeightsError
from tasks.foundation.user_code import describe, load_function
from tasks.init_or_restore.weights.held import Contents, Held, as_array


def call_function(reference: str, code_folder: Path) -> Contents:
    """Call the function, without arguments.

    Raises:
        WeightsError: there is none, it raises, or returns something else than a mapping of names to arrays.
    """
    where = f"init.weights: {reference}"
    remedy = "return a dict of arrays by the paths of variables, {'dense/kernel': …}"
    try:
        function = load_function(reference, code_folder)
    except ModelError as fault:
        raise WeightsError(f"init.weights: {fault}") from fault
    try:
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
