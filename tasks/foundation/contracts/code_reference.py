"""How a run file names a function of the user: `file.py:function` or `package.module:function`."""

from pathlib import PurePosixPath
from typing import Annotated

from pydantic import AfterValidator

_FORMS = "name a function as file.py:function or package.module:function"


def check_code_reference(reference: str) -> str:
    """Check the form of a reference; the file is relative to the run file's folder.

    Raises:
        ValueError: it has neither form.
    """
    module, separator, name = reference.partition(":")
    if not separator or not module or not name.isidentifier():
        raise ValueError(_FORMS)
    if module.endswith(".py"):
        if PurePosixPath(module).is_absolute():
            raise ValueError("name the file relative to the run file's folder")
        if not PurePosixPath(module).stem.isidentifier():
            raise ValueError("the file's name must be a Python name and .py, as my_model.py")
    elif not all(part.isidentifier() for part in module.split(".")):
        raise ValueError(_FORMS)
    return reference


CodeReference = Annotated[str, AfterValidator(check_code_reference)]
