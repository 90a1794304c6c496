"""The model, the run file and the user's code, as the home has them: sections of the report's page."""

from collections.abc import Iterator

import yaml

from tasks.evaluate.report.tables import Cell, Section, Table, number
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.contracts.model_summary import ModelSummary
from tasks.foundation.contracts.saved_code import SAVED_CODE, SavedCode, is_saved_code
from tasks.foundation.errors import AnotherVersion, FileMissing, FileTooLarge, PathRefused, RunLogError
from tasks.foundation.masking import masked_values
from tasks.foundation.messages import counted
from tasks.foundation.storage.base import Storage

_MOST_CHARACTERS = 200_000
_MOST_LAYERS = 500


def saved_code_sections(home: Storage, head: Head) -> Iterator[Section]:
    """The newest model, run file and code; no section if the home has none, or none that can be read.

    Args:
        home: the run's.
        head: the newest state, which names them.
    """
    path = head.identity.get(SAVED_CODE)
    saved = read_saved_code(home, path)
    if saved is None:
        return
    if saved.model is not None:
        yield _model_section(saved.model)
    spec = saved.run_file  # in which earlier versions saved secrets
    shown = [
        (
            "run file, the keys that differ from their defaults",
            yaml_text(masked_values(spec.model_dump(mode="json", exclude_defaults=True))),
        ),
        (
            "run file, all keys",
            yaml_text(masked_values(spec.model_dump(mode="json"))),
        ),
        *((file.path, file.text) for file in saved.files if file.text is not None),
    ]
    yield Section(
        heading="Run file and code",
        note=f"As of the last accepted change, from {path} in the home."
        + ("" if saved.revision is None else f" Git revision {saved.revision}."),
        texts=tuple((name, cut_text(text)) for name, text in shown),
    )


def _model_section(model: ModelSummary) -> Section:
    rows = [
        [
            Cell(layer.name),
            Cell(layer.kind),
            Cell(layer.output_shape or "", "wrap code"),
            number(f"{layer.parameters:,}"),
        ]
        for layer in model.layers[:_MOST_LAYERS]
    ]
    more = len(model.layers) - len(rows)
    return Section(
        heading="Model",
        table=Table(headings=("layer", "class", "output shape", "parameters"), rows=rows, numbers=frozenset({3})),
        note=(f"{counted(more, 'more layer', thousands=',')}. " if more else "")
        + f"{model.parameters:,} parameters, {model.trainable:,} of them trainable; the optimizer has "
        f"{model.optimizer:,} numbers of its own.",
    )


def read_saved_code(home: Storage, path: object) -> SavedCode | None:
    """The run file and the code that an identity names; None if the home has none, or none that can be read."""
    if not is_saved_code(path):
        return None
    try:
        return SavedCode.from_json(home.read(str(path)), where=f"{home.uri}/{path}", error=RunLogError)
    except (AnotherVersion, FileMissing, FileTooLarge, PathRefused, RunLogError):  # `verify` says what is wrong
        return None


def yaml_text(value: object) -> str:
    """The value as YAML, keys in their order."""
    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


def cut_text(text: str) -> str:
    """The beginning of a text that is too long for a page."""
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}\n…"
