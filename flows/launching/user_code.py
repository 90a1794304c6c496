"""The user's code in other processes: it must be the code that the run was started with."""

from collections.abc import Mapping
from pathlib import Path

from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import InvalidInput
from tasks.foundation.model.code_digest import file_references, module_digest
from tasks.foundation.user_code import require_function


def code_digests(spec: RunSpec, folder: Path) -> dict[str, str]:
    """Digest of each function of the run file's folder that it names; layout and comments do not count."""
    return {reference: module_digest(reference, folder) for reference in file_references(spec)}


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
