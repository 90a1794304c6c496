"""What child processes of `multiprocessing` import of the process that started them."""

import sys
from importlib.machinery import ModuleSpec


def keep_main_module_from_children(*, only_of: str = "") -> None:
    """Do not let child processes of the user's code import the main module of this process.

    A child with the start method *spawn* or *forkserver* imports the main module of its parent, since a function that
    it is sent may be from there. None of the user's is, and it takes seconds to import a command of Baton or Prefect.
    `multiprocessing` leaves a main module alone if its name ends with `.__main__`.

    Args:
        only_of: a package; do so only if the main module is one of its modules.
    """
    main = sys.modules["__main__"]
    name = getattr(main.__spec__, "name", "")
    if not only_of or name.startswith(f"{only_of}."):
        main.__spec__ = ModuleSpec("baton.__main__", loader=None)
