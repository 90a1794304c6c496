"""`baton init`: writes a run file, a model and a data source that train in seconds."""

import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import RUN_FILE, AsJson
from flows.commands.output import Output, say_json
from tasks.foundation.errors import InvalidInput

# File to write -> its template in new_run/, and what it is. The templates are no modules of Baton.
_FILES = {
    RUN_FILE: ("run.yaml", "what is trained, how long, and where it goes"),
    "model.py": ("model.py.txt", "build_model returns a compiled Keras model"),
    "data.py": ("data.py.txt", "load returns what you would pass to fit"),
}


def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="where to write; made if it is missing")] = Path(),
    as_json: AsJson = False,
) -> None:
    """Write a run file, a model and data that train in seconds.

    Nothing that is there is overwritten.
    """
    there = [name for name in _FILES if (folder / name).exists() or (folder / name).is_symlink()]
    if there:
        raise InvalidInput(
            f"{folder / there[0]} is already there, and nothing was written; name another folder, or move it away"
        )
    texts = {
        name: (files("flows.commands") / "new_run" / template).read_text("utf-8")
        for name, (template, _) in _FILES.items()
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as fault:
        raise InvalidInput(f"{fault.filename}: cannot be written ({fault.strerror}); name another folder") from fault
    if as_json:
        say_json({"folder": str(folder.resolve()), "files": list(_FILES)})
        return
    out = Output.to(sys.stdout)
    out.table([(str(folder / name), what) for name, (_, what) in _FILES.items()])
    enter = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    out.line(f"train it with: {enter}baton run")
