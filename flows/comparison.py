"""Several runs beside each other: what a person changed from one to the next, and the curves that came of it.

The log records all that decides the bits, which is far more than a person edits: one more layer changes hundreds of
values of the architecture, and one edited line of code a digest. So what is recorded is folded. The learning rate, the
optimizer, the loss, the number of parameters, the data and the code are a row each; the code also as a diff of the
files that each home keeps. Other keys stand as they are recorded. What is equal, or says nothing, is only counted.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

from baton.flows.facts import RunFacts, best_json, best_words
from baton.flows.opened_run import RunHome
from baton.tasks.evaluate.report.sections import Cell, Table, code_diffs, number
from baton.tasks.foundation.contracts.home_files import SAVED_CODE, SavedCode
from baton.tasks.foundation.contracts.identity import IDENTITY, differences, leaves, readable
from baton.tasks.foundation.contracts.log_entry import Environment, Head
from baton.tasks.foundation.contracts.run_spec import TRAIN_EXAMPLES
from baton.tasks.foundation.dataset.manifest import files_of
from baton.tasks.foundation.log.history import History, commit_of, history_of
from baton.tasks.foundation.model.code_changes import read_saved_code
from baton.tasks.foundation.telemetry.formatting import duration_words, epoch_words, number_words
from baton.tasks.foundation.text import listed

ABSENT: Final = "absent"
_EMPTY: Final[tuple[object, ...]] = (None, ABSENT, "", [], {})
_DIGEST_CHARACTERS: Final = 8
_DIGEST: Final = re.compile(r"[0-9a-f]{32,64}")
# Keys whose values are too many to list where they are equal, or digests.
_WHOLE: Final = ("model.config", "model.code", "model.signature", "model.contents", "data.contents")
_MOST_ARGUMENTS: Final = 4


@dataclass(frozen=True, kw_only=True)
class ComparedRun(RunFacts):
    """One of several runs beside each other, with its curves and its code.

    Attributes:
        name: of the run, made unique among those that are compared.
        history: the curves.
    """

    name: str
    history: History

    @cached_property
    def saved(self) -> SavedCode | None:
        """The newest run file and code in the home; None if it has none that can be read."""
        return read_saved_code(self.run.home, self.head.identity.get(SAVED_CODE))

    @property
    def seconds(self) -> float:
        """In committed segments, all causes together."""
        return sum(self.history.seconds.values())

    @property
    def examples_per_second(self) -> float | None:
        """While training; None if the log does not say it."""
        commits = [commit_of(entry) for entry in self.history.commits]
        seconds = sum(commit.seconds.get("train", 0.0) for commit in commits)
        return sum(commit.examples for commit in commits) / seconds if seconds > 0 else None

    def json(self) -> dict[str, object]:
        """JSON values."""
        return {
            "run": self.name,
            "home": self.run.home.uri,
            "step": self.step,
            "epoch": self.epoch,
            "training": self.training,
            "validation": self.validation,
            "test": self.test,
            "best": best_json(self.head.best),
            "seconds": self.seconds,
            "examples_per_second": self.examples_per_second,
            "metadata": self.totals.metadata,
            "logged": None if self.totals.logged is None else self.totals.logged.model_dump(),
        }


class CodeDiff(NamedTuple):
    """How one file of a run's code differs from that of the first run."""

    run: str
    file: str
    diff: str

    @property
    def counts(self) -> str:
        """`model.py +2 -1`: the lines that were added and removed."""
        lines = self.diff.splitlines()[2:]  # without the names of the files
        added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
        return f"{self.file} +{added} -{removed}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What differs between runs.

    Attributes:
        runs: at least two.
        settings: metadata, identity and environment where not all runs agree: by key, the value of each run.
        changed: the same as a person would say it: by words, the text of each run.
        code: the files that differ from those of the first run.
        equal: what all runs have, by key, without what is empty.
    """

    runs: tuple[ComparedRun, ...]
    settings: Mapping[str, Sequence[object]]
    changed: Mapping[str, Sequence[str]]
    code: tuple[CodeDiff, ...]
    equal: Mapping[str, object]

    @classmethod
    def of(cls, homes: Sequence[RunHome]) -> "Comparison":
        """Read the logs and the saved code of runs.

        Raises:
            NoSuchRun: one of them has no log.
            RunLogError: an entry of a log cannot be read.
        """
        runs = compared(homes)
        settings = differing_settings(runs)
        code = tuple(_code_diffs(runs))
        return cls(
            runs=tuple(runs),
            settings=settings,
            changed=dict(_changed(runs, settings, code))
            or {key: list(map(value_text, settings[key])) for key in settings},
            code=code,
            equal=dict(_equal(runs, settings)),
        )

    @property
    def metric_names(self) -> list[str]:
        """All metrics of the curves, the loss first."""
        names = dict.fromkeys(name for run in self.runs for name in run.history.metric_names)
        return sorted(names, key=lambda name: name != "loss")

    @property
    def values_table(self) -> Table:
        """What the runs have reached: a row for each value, a column for each run."""
        runs = self.runs
        rows = {
            "step": [f"{run.step:,}" for run in runs],
            "epoch": ["" if run.epoch is None else epoch_words(run.epoch).removeprefix("epoch ") for run in runs],
        }
        for label in ("training", "validation", "test"):
            metrics = [getattr(run, label) for run in runs]
            for name in dict.fromkeys(name for each in metrics for name in each):
                rows[f"{label} {name}"] = [number_words(each[name]) if name in each else "" for each in metrics]
        bests = [run.head.best for run in runs]
        for metric in dict.fromkeys(best.metric for best in bests if best is not None):
            words = (best_words(best) if best is not None and best.metric == metric else "" for best in bests)
            rows[f"best {metric}"] = [each.removeprefix(f"{metric} ") for each in words]
        rows["committed segments took"] = [duration_words(run.seconds) for run in runs]
        speeds = [run.examples_per_second for run in runs]
        rows["examples/s while training"] = ["" if speed is None else f"{speed:,.0f}" for speed in speeds]
        return Table(
            headings=("", *(run.name for run in runs)),
            rows=[[Cell(label), *map(number, texts)] for label, texts in rows.items() if any(texts)],
        )

    @property
    def changes_table(self) -> Table:
        """What differs between the runs, in the words of a person."""
        return Table(
            headings=("what differs", *(run.name for run in self.runs)),
            rows=[[Cell(key), *(Cell(value, "wrap code") for value in each)] for key, each in self.changed.items()],
        )

    def json(self) -> dict[str, object]:
        """JSON values."""
        return {
            "runs": [run.json() for run in self.runs],
            "settings": self.settings,
            "changed": self.changed,
            "code": [each._asdict() for each in self.code],
            "equal": self.equal,
        }


def compared(runs: Sequence[RunHome]) -> list[ComparedRun]:
    """Read the logs of runs. Further runs of one name get a number.

    Raises:
        NoSuchRun: one of them has no log.
        RunLogError: an entry of a log cannot be read.
    """
    found: list[ComparedRun] = []
    for run in runs:
        run.require_head()
        entries = list(run.log.entries(blocks="read"))
        names = {other.name for other in found}
        count = 1 + sum(other.name.partition(" (")[0] == run.name for other in found)
        name = f"{run.name} ({count})" if run.name in names or count > 1 else run.name
        newest = entries[-1] if entries else run.require_newest()
        totals = run.log.totals(newest)
        found.append(ComparedRun(run=run, newest=newest, totals=totals, name=name, history=history_of(entries)))
    return found


def differing_settings(runs: Sequence[ComparedRun]) -> dict[str, list[object]]:
    """Metadata, identity and environment where not all runs agree: by key, the value of each run."""
    first, values = runs[0], dict[str, list[object]]()
    known = [run.totals.metadata for run in runs]
    for name in dict.fromkeys(name for each in known for name in each):
        of_runs: list[object] = [each.get(name, ABSENT) for each in known]
        if any(value != of_runs[0] for value in of_runs):
            values[f"metadata.{name}"] = of_runs
    for place, run in enumerate(runs):
        for key, old, new in _differences(first.head, run.head):
            values.setdefault(key, [old] * len(runs))[place] = new
    return values


def _differences(one: Head, other: Head) -> Iterator[tuple[str, object, object]]:
    yield from ((each.key, each.recorded, each.now) for each in differences(one.identity, other.identity))
    before, after = one.environment.facts(), other.environment.facts()
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key, ABSENT), after.get(key, ABSENT)
        if old != new:
            yield _key_of_environment(key), old, new


def _key_of_environment(key: str) -> str:
    return f"environment.{key}" if key in Environment.model_fields else key


def _equal(runs: Sequence[ComparedRun], settings: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """What all runs have. Of an architecture and of contents, only that they are the same."""
    identity = runs[0].head.identity
    for key in IDENTITY:
        if not all(key in run.head.identity for run in runs) or identity[key] in _EMPTY:
            continue
        if key in _WHOLE:
            if not any(name == key or name.startswith((f"{key}.", f"{key}[")) for name in settings):
                yield key, "the same"
            continue
        yield from (
            (name, value) for name, value in leaves(key, identity[key]) if name not in settings and value not in _EMPTY
        )
    metadata = {f"metadata.{name}": value for name, value in runs[0].totals.metadata.items()}
    yield from ((key, value) for key, value in metadata.items() if key not in settings)
    for name, value in runs[0].head.environment.facts().items():
        if _key_of_environment(name) not in settings:
            yield _key_of_environment(name), value


def _code_diffs(runs: Sequence[ComparedRun]) -> Iterator[CodeDiff]:
    first = runs[0].saved
    for run in runs[1:]:
        if first is None or run.saved is None:
            continue
        files, others = first.text_files, run.saved.text_files
        names = (runs[0].name, run.name)
        yield from (CodeDiff(run.name, file, diff) for file, diff in code_diffs(files, others, *names))


def _changed(
    runs: Sequence[ComparedRun], settings: Mapping[str, Sequence[object]], code: Sequence[CodeDiff]
) -> Iterator[tuple[str, list[str]]]:
    """The rows that a person reads, of what they change most to what they change least."""
    for words, keys, value_of in _ROWS:
        values = [value_of(run) for run in runs]
        if any(key.startswith(keys) for key in settings) and len(set(values)) > 1:
            yield words, [value or "not known" for value in values]
    if "data.content_digest" in settings:
        read = [files_of(run.run.root, str(run.head.identity.get("data.folder"))) for run in runs]
        paths = [listed([path for path in files if files[path] != read[0].get(path)]) for files in read]
        if any(paths):
            yield "files of the data", paths
    files = [", ".join(each.counts for each in code if each.run == run.name) for run in runs]
    digests = [found for key, found in settings.items() if key.startswith("model.code")]
    said = [
        text or ("differs" if any(found[place] != found[0] for found in digests) else "")
        for place, text in enumerate(files)
    ]
    if any(said):
        yield "code", said
    yield from _architecture(runs[0], {key: found for key, found in settings.items() if key.startswith("model.config")})
    same_optimizer = len({_optimizer(run) for run in runs}) == 1
    for key, found in settings.items():
        folded = key.startswith(_FOLDED) or (
            key.startswith(_OPTIMIZER) and ("learning_rate" in key or not same_optimizer)
        )
        if not folded and not all(value in _EMPTY for value in found):
            yield key.replace(f"{_OPTIMIZER}.config.", "optimizer "), [value_text(value) for value in found]


def _architecture(first: ComparedRun, settings: Mapping[str, Sequence[object]]) -> Iterator[tuple[str, list[str]]]:
    """The arguments of layers that differ; their number where they are many, as with another layer."""
    known = {key: found for key, found in settings.items() if "build_config" not in key and "inbound_nodes" not in key}
    if len(known) > _MOST_ARGUMENTS:
        several = list(known.values())
        counts = [sum(found[place] != found[0] for found in several) for place in range(len(several[0]))]
        yield "architecture", [f"{count:,} values differ" if count else "" for count in counts]
        return
    names = {f"model.config{key}": name for key, name in _layer_names(first.head.identity.get("model.config"))}
    for key, found in known.items():
        layer = next((name for name in names if key.startswith(f"{name}.")), "")
        words = f"layer {names[layer]}: {key.removeprefix(f'{layer}.config.')}" if layer else key
        yield words, [value_text(value) for value in found]


def _layer_names(model: object) -> Iterator[tuple[str, str]]:
    """The place of each layer in the configuration of a model, and its name."""
    layers = _configuration(model)[1].get("layers")
    for place, layer in enumerate(layers if isinstance(layers, Sequence) else ()):
        yield f".config.layers[{place}]", str(_configuration(layer)[1].get("name"))


def value_text(value: object) -> str:
    """A recorded value as people write it; of a digest, its beginning."""
    if isinstance(value, str):
        return value[:_DIGEST_CHARACTERS] if _DIGEST.fullmatch(value) else value
    return str(readable(value))


def _configuration(value: object) -> tuple[str, Mapping[str, object]]:
    """Name and arguments of what Keras has serialized."""
    if not isinstance(value, Mapping):
        return "" if value is None else value_text(value), {}
    config = value.get("config")
    return str(value.get("class_name", "")), config if isinstance(config, Mapping) else {}


def _words(value: object) -> str:
    """`0.001`, or a schedule with its arguments: `CosineDecay(initial_learning_rate=0.001, decay_steps=1000)`."""
    name, config = _configuration(value)
    arguments = (f"{key}={value_text(each)}" for key, each in config.items() if key != "name" and each not in _EMPTY)
    return f"{name}({', '.join(arguments)})" if config else name


def _optimizer_of(run: ComparedRun) -> tuple[str, Mapping[str, object]]:
    """The optimizer without what wraps it, such as a loss scale."""
    name, config = _configuration(run.head.identity.get(_OPTIMIZER))
    while "inner_optimizer" in config:
        name, config = _configuration(config["inner_optimizer"])
    return name, config


def _optimizer(run: ComparedRun) -> str:
    return _optimizer_of(run)[0]


def _learning_rate(run: ComparedRun) -> str:
    return _words(_optimizer_of(run)[1].get("learning_rate"))


def _loss(run: ComparedRun) -> str:
    return _words(run.head.identity.get("compile.loss"))


def _metrics(run: ComparedRun) -> str:
    found = run.head.identity.get("compile.metrics")
    return ", ".join(map(_words, found)) if isinstance(found, list) else _words(found)


def _batch(run: ComparedRun) -> str:
    return value_text(run.head.identity.get("train.global_batch_size", ""))


def _parameters(run: ComparedRun) -> str:
    model = None if run.saved is None else run.saved.model
    return "" if model is None else f"{model.parameters:,}"


def _data(run: ComparedRun) -> str:
    """The source and its size. A digest tells data apart that have the same."""
    identity = run.head.identity
    examples = identity.get(TRAIN_EXAMPLES)
    size = f"{examples:,} examples, " if isinstance(examples, int) else ""
    return (
        f"{identity.get('data.source', 'data')}: {size}{str(identity.get('data.content_digest'))[:_DIGEST_CHARACTERS]}"
    )


_OPTIMIZER: Final = "compile.optimizer"
# Words -> the recorded keys that they stand for, and the text of a run. A row is shown where the texts differ.
_ROWS: Final[tuple[tuple[str, tuple[str, ...], Callable[[ComparedRun], str]], ...]] = (
    ("learning rate", (_OPTIMIZER,), _learning_rate),
    ("optimizer", (_OPTIMIZER,), _optimizer),
    ("batch", ("train.global_batch_size",), _batch),
    ("loss", ("compile.loss",), _loss),
    ("metrics", ("compile.metrics",), _metrics),
    ("parameters", ("model.config", "model.signature"), _parameters),
    ("training data", ("data.content_digest",), _data),
)
_FOLDED: Final = (
    *("model.config", "model.code", "model.signature"),
    *("compile.loss", "compile.metrics", "train.global_batch_size", "data.content_digest"),
)
