"""`baton init`: writes a run file, a model and a data source that train in seconds; or, with --data, what fits data.

With `--data` it looks at files, says what it sees, and writes the run file and the model for them.
"""

import os
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baton.flows.commands.options import RUN_FILE, AsJson
from baton.flows.commands.output import Output, say_json
from baton.tasks.foundation.errors import InvalidInput
from baton.tasks.foundation.machine.environment import quiet_tensorflow
from baton.tasks.foundation.text import counted

if TYPE_CHECKING:
    from baton.tasks.prepare_data.look import Found

# File to write -> its template in new_run/, and what it is. The templates are no modules of Baton.
_FILES = {
    RUN_FILE: ("run.yaml", "what is trained, how long, and where it goes"),
    "model.py": ("model.py.txt", "build_model returns a compiled Keras model"),
    "data.py": ("data.py.txt", "load returns what you would pass to fit"),
}


def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="where to write; made if it is missing")] = Path(),
    data: Annotated[
        str | None,
        typer.Option(
            "--data", metavar="PATH", help="look at a file, a folder, a pattern or a gs:// address, and fit the run"
        ),
    ] = None,
    label: Annotated[
        str | None, typer.Option("--label", metavar="NAME", help="with --data: the column to predict")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run file, a model and data that train in seconds.

    Nothing that is there is overwritten. With --data the run trains on files
    of yours, from where they are.
    """
    if label is not None and data is None:
        raise InvalidInput(f"--label {label} names a column of --data; add --data PATH")
    names = [name for name in _FILES if data is None or name != "data.py"]
    there = [name for name in names if (folder / name).exists() or (folder / name).is_symlink()]
    if there:
        raise InvalidInput(
            f"{folder / there[0]} is already there, and nothing was written; name another folder, or move it away"
        )
    seen: dict[str, Any] = {}
    out = Output.to(sys.stdout)
    if data is None:
        texts = {name: _template(_FILES[name][0]) for name in names}
    else:
        texts, seen = _fitting(data, label, folder)
        if not as_json:
            _say_seen(out, seen)
    _write(folder, texts)
    if as_json:
        say_json({"folder": str(folder.resolve()), "files": names, **({"data": seen} if seen else {})})
        return
    out.table([(str(folder / name), _FILES[name][1]) for name in names])
    enter = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    out.line(f"train it with: {enter}baton run")


def _write(folder: Path, texts: Mapping[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as fault:
        raise InvalidInput(f"{fault.filename}: cannot be written ({fault.strerror}); name another folder") from fault


def _fitting(path: str, label: str | None, folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the files that fit the data, and what was seen of it."""
    from baton.flows.commands.fitting_run import data_keys, run_text, takes_texts
    from baton.tasks.prepare_data.look import look

    if Path(path).is_dir() and folder.resolve().is_relative_to(Path(path).resolve()):
        raise InvalidInput(
            f"{folder} is in the folder of the data, which would have other files then; name a folder for the run: "
            f"baton init NEW --data {path}"
        )
    quiet_tensorflow()
    found = look(path, label)
    paths = [options["path"] for options in (found.plan.options, *found.plan.sets.values())]
    keys = data_keys(found, {each: _from(folder, each) for each in paths})
    name = path if path.strip("./") else Path.cwd().name
    model = _template("data_model.py.txt")
    if takes_texts(found):
        model = model.replace("import keras\n", "import keras\nimport tensorflow as tf\n") + _template("words.py.txt")
    return {RUN_FILE: run_text(found, keys, name), "model.py": model}, _seen(found, path)


def _template(name: str) -> str:
    return (files("baton.flows.commands") / "new_run" / name).read_text("utf-8")


def _from(folder: Path, path: str) -> str:
    """Return a path as a run file in the folder names it: a relative one stays relative."""
    if "://" in path or path.startswith(("/", "~")):
        return path
    return os.path.relpath(path, folder)


def _seen(found: "Found", path: str) -> dict[str, Any]:
    span = found.label_range
    return {
        "path": path,
        "source": found.plan.source,
        "examples": found.examples,
        "counted": found.is_whole,
        "columns": [
            {"name": each.name, "type": each.type, "nulls": each.nulls, "use": each.use} for each in found.plan.columns
        ],
        "features": [{"name": each.name, "dtype": each.dtype, "shape": list(each.shape)} for each in found.features],
        "classes": found.classes,
        "class_names": list(found.class_names or found.label.vocabulary),
        "labels": None if span is None else list(span),
        "sets": list(found.plan.sets),
        "notes": list(found.notes),
    }


def _say_seen(out: Output, seen: Mapping[str, Any]) -> None:
    more = "" if seen["counted"] else " or more; these were read"
    sets = "".join(f", and a {name} set" for name in seen["sets"])
    facts = [
        ("data", f"{seen['path']}, read by the source {seen['source']}"),
        ("examples", f"{seen['examples']:,}{more}{sets}"),
        *(("note", text) for text in seen["notes"]),
        *((each["name"], f"{each['dtype']}{each['shape']}") for each in seen["features"]),
        ("labels", _labels(seen)),
    ]
    columns = [
        (each["name"], each["type"], counted(each["nulls"], "null") if each["nulls"] else "", each["use"])
        for each in seen["columns"]
    ]
    widest = max(len(name) for name, _ in facts)
    facts = [(name.ljust(widest), text) for name, text in facts]
    before = 2 + len(seen["notes"])
    out.facts(facts[:before])
    out.table([("column".ljust(widest), *column) for column in columns])
    out.facts(facts[before:])


def _labels(seen: Mapping[str, Any]) -> str:
    names, span = seen["class_names"], seen["labels"]
    if seen["classes"] is not None:
        return f"{counted(seen['classes'], 'class', 'classes')}{': ' + ', '.join(names[:10]) if names else ''}"
    return "" if span is None else f"from {span[0]:g} to {span[1]:g}"
