"""A source that the user writes: a function such as `data.py:load`, and the forms of what it returns.

It returns arrays, a `tf.data.Dataset`, a `PyDataset`, or examples or batches one by one. The form decides how it is
read, never a guess: several sets, and what can be read two ways, are refused (refused_forms.py). How it was read is
said in the log. The whole pass runs in the run file's folder.
"""

import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from baton.tasks.foundation.contracts.data_spec import DataSpec
from baton.tasks.foundation.contracts.dataset import CLASSES
from baton.tasks.foundation.errors import ModelError, RunFileError, SourceError
from baton.tasks.foundation.model.saved_code import module_digest
from baton.tasks.foundation.seeding import numpy_entropy_from, random_source, seed_as_after_import
from baton.tasks.foundation.telemetry.events import Note
from baton.tasks.foundation.text import counted, message
from baton.tasks.foundation.user_functions import in_user_folder, load_function
from baton.tasks.foundation.user_traceback import user_error
from baton.tasks.prepare_data.sources.read_once import TRANSFORM, DrawWatch, SecondPass, draws_of_dataset
from baton.tasks.prepare_data.sources.refused_forms import (
    endless_error,
    endless_warning,
    refuse_several_sets,
    refuse_two_readings,
    require_end,
)
from baton.tasks.prepare_data.sources.returned_arrays import (
    columns_of,
    dataset_is_batched,
    describe_parts,
    describe_spec,
    examples_of_batches,
    floatx,
    is_py_dataset,
    is_table,
    is_tf_dataset,
    number_of_batches,
)
from baton.tasks.prepare_data.sources.source import LocatedExample, OpenedFiles, Source, suggestion

T = TypeVar("T")
# Entered while the user's code runs.
Surroundings = Callable[[], AbstractContextManager[None]]
# A source without end shows itself by its number of examples, if nothing else does.
WARN_AT_EXAMPLES = 1_000_000
REMEDY = (
    "return arrays (x, y), a tf.data.Dataset or a keras.utils.PyDataset; or make it a generator function: yield x, "
    "(x, y) or (x, y, sample_weight) for each example"
)
_FIRST_EPOCH = (
    "to train on its first epoch in every epoch, yield its batches (for n in range(len(batches)): yield batches[n]) "
    "and set data.batched: true"
)
_PARTS = {"x", "y", "sample_weight"}
_OPENED_BY_IMPORT: dict[tuple[Path, str], OpenedFiles] = {}


def call_user(reference: str, work: Callable[[], T], surroundings: Surroundings, *, what: str = "") -> T:
    """Call the user's code.

    Args:
        reference: the user's function, for messages.
        work: calls it.
        surroundings: entered meanwhile.
        what: text such as ` (example 3)`, for messages.

    Raises:
        SourceError: it raised; names the error, the file and the line.
    """
    with surroundings():
        try:
            return work()
        except StopIteration:
            raise
        except (Exception, SystemExit) as fault:
            raise SourceError(user_error(f"{reference}: raised", fault, end=what)) from fault


def user_items(
    reference: str, items: Iterable[object], surroundings: Surroundings, *, what: str
) -> Iterator[tuple[str, object]]:
    """Yield the items with their place, such as `data.py:load, example 3`.

    Args:
        reference: the user's function, for messages.
        items: what it returned.
        surroundings: entered while the next item is made.
        what: what an item is: `example` or `batch`.

    Raises:
        SourceError: see `call_user`.
    """
    iterator = call_user(reference, lambda: iter(items), surroundings)
    index = 0
    while True:
        try:
            item = call_user(reference, lambda: next(iterator), surroundings, what=f" ({what} {index})")
        except StopIteration:
            return
        yield f"{reference}, {what} {index}", item
        index += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Reads what a function returned.

    Attributes:
        reference: the function, for messages.
        options: `data.options`, for messages.
        batched: `data.batched`.
        accepted: the run has begun with its examples, so they are not refused as ambiguous.
        bounded: `data.examples` is set, so the source may be endless.
        ragged: `data.pad` or `data.pack` is set, so examples may differ in length.
        ordered: `data.shuffle` is false, so the order of the examples counts.
        note: receives how it is read, and warnings of what is read once though it may change with each pass.
        surroundings: entered while the user's code runs.
    """

    reference: str
    options: Mapping[str, Any] = field(default_factory=dict)
    batched: bool | None = None
    accepted: bool = False
    bounded: bool = False
    ragged: bool = False
    ordered: bool = False
    note: Callable[[Note], None] = lambda _: None
    surroundings: Surroundings = nullcontext

    def read(self, returned: object) -> Iterator[LocatedExample]:
        """Yield the examples.

        Raises:
            SourceError: it has an unsupported form, is ambiguous or endless, or its code raised.
        """
        if is_tf_dataset(returned):
            return self._tf_dataset(returned)
        if is_py_dataset(returned):
            return self._py_dataset(returned)
        told = self.accepted or self.batched is not None
        refuse_several_sets(self.reference, returned, self.options, datasets_only=told)
        if isinstance(returned, Mapping):
            return self._dict(returned)
        if is_table(returned):
            return self._table(returned)
        if isinstance(returned, tuple | list) and self.batched is not False:
            parts = _as_arrays(returned)
            if parts is not None:
                return self._arrays(parts)
            if not self.accepted and self.batched is None:
                refuse_two_readings(self.reference, returned)
        return self._items(returned)

    def _items(self, returned: object) -> Iterator[LocatedExample]:
        if not isinstance(returned, Iterable) or isinstance(returned, str | bytes):
            raise SourceError(f"{self.reference}: returned {_describe_type(returned)}; {REMEDY}")
        if not self.bounded:
            require_end(self.reference, returned)
        items: Iterable[object] = returned
        if not isinstance(returned, list | tuple):  # their items are there already
            items = DrawWatch(self.reference, self._warn).items(returned)
        return self._stream(items, batched=bool(self.batched))

    def _say(self, text: str) -> None:
        self.note(Note(text=f"{self.reference}: {text}"))

    def _warn(self, text: str) -> None:
        self.note(Note(text=text, warning=True))

    def _stream(self, items: Iterable[object], *, batched: bool) -> Iterator[LocatedExample]:
        located = user_items(self.reference, items, self.surroundings, what="batch" if batched else "example")
        return examples_of_batches(located, ragged=self.ragged) if batched else located

    def _tf_dataset(self, dataset: Any) -> Iterator[LocatedExample]:
        if not self.bounded:
            require_end(self.reference, dataset)
        batched = self.batched
        if batched is None:
            batched = dataset_is_batched(dataset, self.reference, ragged=self.ragged)
            told = "as their shapes tell" if batched is not None else "set data.batched: true if they are batches"
        else:
            told = f"data.batched: {str(batched).lower()}"
        elements = "batches, whose examples are taken one by one" if batched else "single examples"
        self._say(f"the elements {describe_spec(dataset)} are read as {elements} ({told})")
        for words in draws_of_dataset(dataset, order_counts=self.ordered):
            self._warn(f"{self.reference}: {words}")
        return self._stream(dataset, batched=bool(batched))

    def _py_dataset(self, dataset: Any) -> Iterator[LocatedExample]:
        if self.batched is False:
            raise SourceError(
                f"{self.reference}: data.batched: false, but it returned a PyDataset, whose items are batches; remove "
                "data.batched"
            )
        count = number_of_batches(dataset)
        if count is None and not self.bounded:
            raise endless_error(self.reference, "a PyDataset without __len__")
        self._say(f"a PyDataset of {'endless' if count is None else count} batches")
        second, watch = SecondPass(dataset), DrawWatch(self.reference, self._warn, owner=dataset)
        call_user(self.reference, dataset.on_epoch_begin, self.surroundings, what=" (at the begin of an epoch)")
        numbers = itertools.count() if count is None else range(count)
        examples = second.first(self._batches(dataset, numbers, watch))
        if not second.hooks:
            return examples
        if count is None or self.bounded:
            self._warn(
                f"{self.reference}: the PyDataset is read once, so {second.hooks} is without effect; {TRANSFORM}"
            )
            return examples
        return itertools.chain(examples, self._nothing_if_equal(dataset, count, second, watch))

    def _batches(self, dataset: Any, numbers: Iterable[int], watch: DrawWatch) -> Iterator[LocatedExample]:
        """Take batches of a `PyDataset` apart, each as `fit` takes it: a list is (x, y)."""
        batches = (watch.call(dataset.__getitem__, number) for number in numbers)
        return self._stream((tuple(each) if isinstance(each, list) else each for each in batches), batched=True)

    def _nothing_if_equal(
        self, dataset: Any, count: int, second: SecondPass, watch: DrawWatch
    ) -> Iterator[LocatedExample]:
        """Yield no example, but refuse a `PyDataset` whose second epoch has others than the first.

        If its batches draw random numbers, only their number is compared: the draws are said already.
        """

        def begin() -> None:
            dataset.on_epoch_end()
            dataset.on_epoch_begin()

        call_user(self.reference, begin, self.surroundings, what=" (at the end of an epoch)")
        found = second.difference(
            count,
            lambda: call_user(self.reference, lambda: number_of_batches(dataset), self.surroundings),
            None if watch.warned else lambda numbers: self._batches(dataset, numbers, watch),
            order_counts=self.ordered,
        )
        if found:
            text = (
                f"{self.reference}: the PyDataset {type(dataset).__name__} changes between epochs: {found}; it is read "
                f"once, so {second.hooks} is without effect"
            )
            if not self.accepted:
                raise SourceError(message(text, hints=[TRANSFORM, _FIRST_EPOCH]))
            self._warn(f"{text}; {TRANSFORM}")
        yield from ()

    def _dict(self, returned: Mapping[str, object]) -> Iterator[LocatedExample]:
        if set(returned) <= _PARTS and "x" in returned and len(returned) > 1:
            parts = tuple(returned[part] for part in ("x", "y", "sample_weight") if part in returned)
            raise SourceError(
                message(
                    f"{self.reference}: returned a dict of {', '.join(returned)}, which can be read two ways",
                    details=[
                        f"as x, y and so on: {describe_parts(parts)}",
                        f"as inputs of those names: {describe_parts((returned,))}",
                    ],
                    hints=[
                        "for labels: return x, y",
                        "for inputs with these names: return (inputs, labels), or rename",
                    ],
                )
            )
        return self._arrays((returned,))

    def _table(self, returned: object) -> Iterator[LocatedExample]:
        if self.batched is False:
            return self._stream(returned, batched=False)  # type: ignore[arg-type]
        return self._arrays((returned,))

    def _arrays(self, parts: tuple[object, ...]) -> Iterator[LocatedExample]:
        if self.batched is not None:
            raise SourceError(
                f"{self.reference}: data.batched: {str(self.batched).lower()}, but it returned whole arrays: "
                f"{describe_parts(parts)}; remove data.batched, or yield from the arrays"
            )
        remedy = "return arrays of the same length: one row of each array for each example"
        columns = columns_of(
            parts, where=f"{self.reference}: returned arrays", remedy=remedy, ragged=self.ragged, floatx=floatx()
        )
        changed = f"; as in fit, {columns.changed()}" if columns.changed() else ""
        found = f"returned arrays of {counted(columns.length, 'example')}: {columns.described()}"
        self._say(f"{found}{changed}")
        return ((f"{self.reference}, row {index}", row) for index, row in enumerate(columns.rows()))


def _as_arrays(returned: tuple[object, ...] | list[object]) -> tuple[object, ...] | None:
    """Return x, (x, y) or (x, y, sample_weight) if a function returned these as whole arrays."""
    if isinstance(returned, list):
        return None
    parts = returned
    while len(parts) > 1 and parts[-1] is None:
        parts = parts[:-1]
    if not 1 <= len(parts) <= 3 or all(isinstance(each, tuple) for each in parts):  # noqa: PLR2004 - x, y and weights
        return None
    kinds = list(map(_is_whole, parts))
    return parts if any(kinds) else None


def _is_whole(part: object) -> bool:
    """Whether x, y or the weights may be whole arrays, and are not one number or one text."""
    if isinstance(part, Mapping):
        return any(map(_is_whole, part.values()))
    return is_table(part) or (isinstance(part, list | tuple) and len(part) > 0)


def class_names_of(returned: object) -> list[str]:
    """Return the names of the classes that a dataset has, in the order of their numbers; empty if it says none.

    Keras's datasets of directories have `class_names`, those of Hugging Face and of TFDS one feature with `names`.
    """
    features = getattr(returned, "features", None)
    kinds = features.values() if isinstance(features, Mapping) else ()
    labels = [each.names for each in kinds if hasattr(each, "names")]
    names = getattr(returned, "class_names", labels[0] if len(labels) == 1 else None)
    return list(map(str, names)) if isinstance(names, list | tuple) else []


def _describe_type(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def function(
    data: DataSpec,
    folder: Path,
    *,
    seed: int = 0,
    accepted: bool = False,
    note: Callable[[Note], None] = lambda _: None,
) -> Source:
    """Open a source of what the function returns or yields; it is called with the options as keyword arguments.

    Its content is its code, the code of modules that it imports from its folder or package, the options, and
    `data.version`. The files that it opens are known once it is read; change the version where `NOT_SEEN` holds.

    Args:
        data: the run file's `data`; its source is `data.py:load` or `package.module:load`.
        folder: the run file's folder; relative paths that the function opens start there.
        seed: `train.seed`; random numbers that module and function draw derive from it.
        accepted: the run has begun with these examples, so they are not refused as ambiguous.
        note: receives how it is read, and warnings.

    Raises:
        SourceError: there is no such function, or importing it raises.
        RunFileError: the function does not accept these options.
    """
    reference, options = data.source, data.options
    watch, at_import = OpenedFiles(folder), OpenedFiles(folder)
    try:
        with at_import:
            load = load_function(reference, folder, seed=seed, key="data.source")
    except ModelError as fault:
        raise SourceError(str(fault)) from fault
    # A module is imported once per process.
    watch.include(_OPENED_BY_IMPORT.setdefault((folder.absolute(), reference.partition(":")[0]), at_import))
    watch.add(options.values())
    # A file may contain several functions, so the name is part of the content; the file's path is not.
    content = f"{reference.partition(':')[2]} {module_digest(reference, folder)}"
    _check_options(reference, load, options)

    # What the function returns adds the names of the classes. It is written after all examples are read.
    origin = {reference: f"sha256 {content}"}

    def read() -> Iterator[LocatedExample]:
        # Each reading draws the same random numbers.
        module = reference.partition(":")[0]
        seed_as_after_import(module, folder, seed)
        surroundings = partial(numpy_entropy_from, random_source(module, seed))

        def warn(text: str) -> None:
            note(Note(text=text, warning=True))

        with DrawWatch(reference, warn).of_tf_data():
            returned = call_user(reference, lambda: load(**options), surroundings)
        if names := call_user(reference, lambda: class_names_of(returned), surroundings):
            origin[CLASSES] = json.dumps(names)
        watch.add([getattr(returned, "file_paths", ())])  # of Keras's datasets of directories
        reader = Reader(
            reference=reference,
            options=options,
            batched=data.batched,
            accepted=accepted,
            bounded=data.examples is not None,
            ragged=data.has_sequences,
            ordered=not data.shuffle,
            note=note,
            surroundings=surroundings,
        )
        yield from _first(reader.read(returned), data.examples, reference=reference, note=note)

    # For the whole pass: TensorFlow's threads read ahead between two examples, and open files by relative names.
    @contextmanager
    def whole_pass() -> Iterator[None]:
        with in_user_folder(folder), watch:
            yield

    return Source(
        content=content,
        settings=options,
        origin=origin,
        length=None,
        read=read,
        surroundings=whole_pass,
        opened=watch.files,
    )


def _check_options(reference: str, load: Callable[..., object], options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(load)
    except (TypeError, ValueError):
        return  # some callables have no signature; the call itself reports errors
    parameters = signature.parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        known = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]
        for key, value in options.items():
            if key not in known:
                raise RunFileError(
                    f"data.options.{key}: {value!r}: {reference} has no such parameter; {suggestion(key, known)}"
                )
    try:
        signature.bind(**options)
    except TypeError as fault:
        raise RunFileError(
            f"data.options: {dict(options)}: {reference} cannot be called with them: {fault}; set the missing options"
        ) from fault


def _first(
    examples: Iterator[LocatedExample], count: int | None, *, reference: str, note: Callable[[Note], None]
) -> Iterator[LocatedExample]:
    """Yield the first `count` examples, or all.

    Raises:
        SourceError: there are fewer.
    """
    found = 0
    for found, example in enumerate(islice(examples, count), start=1):
        yield example
        if count is None and found == WARN_AT_EXAMPLES:
            note(Note(text=endless_warning(reference, found)))
    if count is not None and found < count:
        raise SourceError(
            f"data.examples: {count}: {reference} has {counted(found, 'example')} only; set it to {found} or remove it"
        )
