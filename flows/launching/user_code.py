"""The user's code in other processes: it must be the code that the run was started with."""

import re
from collections.abc import Mapping
from pathlib import Path

from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import InvalidInput
from tasks.foundation.model.code_digest import module_digest
from tasks.foundation.user_code import require_function

_FILE_REFERENCE = re.compile(r".+\.py:\w+")


def code_digests(spec: RunSpec, folder: Path) -> dict[str, str]:
    """Digest of each function of the run file's folder that it names; layout and comments do not count."""
    weights = (each.source for each in spec.init.weights)
    named = [spec.model.build, *spec.data.all_sources, spec.train.callbacks, *spec.data.transforms, *weights]
    files = [reference for reference in named if reference is not None and _FILE_REFERENCE.fullmatch(reference)]
    return {reference: module_digest(reference, folder) for reference in files}


def require_same_code(digests: Mapping[str, str], folder: Path) -> None:
    """Refuse code that differs from the code the run was started with; another image would train another model.

    Args:
        digests: as `code_digests` returns them.
        folder: the run file's folder in this process.

    Raises:
        InvalidInput: a function of the run file is missing, or differs.
    """
    for reference, digest in digests.items():
        require_function(reference, folder)
        if module_digest(reference, folder) != digest:
            raise InvalidInput(
                f"{reference} in {folder} differs from the code that the flow train-run was started with; mount the "
                "same folder, or rebuild the image"
            )
