"""A committed checkpoint as a Keras file, weights, a SavedModel, a TensorFlow checkpoint, or for another runtime.

The run file builds the model, which must be the one that was trained, and the checkpoint is restored into it. What was
written is read back, and kept only if it is what was trained: every variable by its value, and predictions of
validation examples, see `serving.py`. With the export come the lines of Python that load it without Baton, and
`serving.json`: which checkpoint of which run it is, and what the model takes.

A copy of a home may lack its dataset. Then the model says what it takes, and it predicts zeros.
"""

import ast
import hashlib
import json
import math
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from baton.tasks.evaluate.evaluator import use_averages
from baton.tasks.evaluate.export_target import (
    ENDINGS,
    RUNTIMES,
    TOLERANCE_OF_ROUNDED,
    VALUES,
    atomic_target,
    require_free_target,
    require_runtime,
    serving_path,
)
from baton.tasks.evaluate.serving import (
    COMPARED,
    OPENVINO_MODEL,
    PredictionComparison,
    Value,
    difference,
    inputs_of_saved_model,
    load_lines,
    model_inputs_of,
    read_back,
    require_close,
    require_no_text,
    serving_json,
    write_for_runtime,
)
from baton.tasks.foundation.checkpoint.restore import restore_checkpoint
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.data_spec import SetRef
from baton.tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef, Feature
from baton.tasks.foundation.contracts.identity import difference_words, differences
from baton.tasks.foundation.contracts.log_entry import Environment, Head
from baton.tasks.foundation.contracts.placement import AcceleratorSpec, per_replica_batch_size
from baton.tasks.foundation.contracts.run_file import RunFile
from baton.tasks.foundation.contracts.run_spec import RunSpec, with_examples, with_recorded_examples
from baton.tasks.foundation.dataset.evaluation_sets import set_batches
from baton.tasks.foundation.dataset.manifest import manifest_path, read_manifest, zero_examples
from baton.tasks.foundation.dataset.model_inputs import ModelInputs, model_inputs
from baton.tasks.foundation.dataset.shards import original_read_errors
from baton.tasks.foundation.errors import (
    BatonError,
    DamagedDataset,
    FileMissing,
    InvalidInput,
    ModelError,
    StateMismatch,
)
from baton.tasks.foundation.keras_config import keep_keras_config
from baton.tasks.foundation.log.history import evaluation_of
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.machine.devices import Accelerator, acquire
from baton.tasks.foundation.machine.processes import HASH_SEED, hash_seed
from baton.tasks.foundation.model.build import build_model, has_fixed_batch_size, lengths_asked_for
from baton.tasks.foundation.model.model_identity import model_identity
from baton.tasks.foundation.model.variables import named_layers, values_in_file
from baton.tasks.foundation.state.train_state import TrainState, build_train_state
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.local_files import temporary_folder
from baton.tasks.foundation.text import abridged, counted, listed, message, option
from baton.tasks.foundation.user_functions import load_function
from baton.tasks.foundation.user_traceback import USER_PACKAGE_PREFIX, user_error


def restored_model(
    run: RunFile, head: Head, ref: CheckpointRef, *, root: Storage, home: Storage, accelerator: Accelerator
) -> keras.Model:
    """Return the compiled model with the state of a checkpoint, and the averages of `use_ema`, as evaluation uses them.

    Args:
        run: the run file; it must build the model that the run was trained with.
        root: storage root with the run's dataset, whose manifest has the shapes of the model's inputs.
        accelerator: where the model is built.

    Raises:
        InvalidInput: the run file builds another model; or the dataset is missing, and the model does not say what it
            takes.
        StateMismatch: the run file builds a model with other variables.
        DamagedCheckpoint: the checkpoint differs from its manifest.
        DamagedDataset: the dataset's manifest is damaged.
        ModelError: the model cannot be built.
    """
    return _restored(run, head, ref, root=root, home=home, accelerator=accelerator).state.model


@dataclass(frozen=True, slots=True, kw_only=True)
class _Restored:
    """A state restored from a checkpoint, and its examples; without `manifest` the dataset is missing."""

    state: TrainState
    inputs: ModelInputs
    manifest: DatasetManifest | None
    batch_size: int


def _restored(
    run: RunFile, head: Head, ref: CheckpointRef, *, root: Storage, home: Storage, accelerator: Accelerator
) -> _Restored:
    batch_size = per_replica_batch_size(run.spec.train.global_batch_size, head.environment.replicas)

    def restored(spec: RunSpec, inputs: ModelInputs, manifest: DatasetManifest | None) -> _Restored:
        batch = zero_examples(inputs.train, batch_size)
        state = build_train_state(spec, code_folder=run.folder, accelerator=accelerator, batch=batch)
        _require_same_model(run, head, state.model, home, batch=batch_size)
        restore_checkpoint(state, home, ref)
        use_averages(state.model)
        return _Restored(state=state, inputs=inputs, manifest=manifest, batch_size=batch_size)

    folder = head.identity["data.folder"]
    try:
        manifest = read_manifest(root, folder)
    except DamagedDataset as fault:
        if not isinstance(fault.__cause__, FileMissing):
            raise
    else:
        inputs = model_inputs(run.spec, manifest.features, run.folder)
        return restored(with_examples(run.spec, manifest.train_examples), inputs, manifest)
    spec = with_recorded_examples(run.spec, head.identity)
    built = build_model(spec, code_folder=run.folder, accelerator=accelerator)
    for guess in dict.fromkeys(_declared_examples(built)):
        # The checkpoint has the variables of loss and metrics too, so no wrong guess is restored.
        with suppress(ModelError, StateMismatch):
            return restored(spec, ModelInputs(train=guess, validation=guess), None)
    raise InvalidInput(
        f"{root.uri}/{manifest_path(folder)} is missing, and the model does not say which examples it takes; copy this "
        "file there too, without the rest of the dataset"
    )


# For a dimension of any length.
_LENGTHS = (8, 64)


def _declared_examples(model: keras.Model) -> Iterator[tuple[Feature, ...]]:
    """Yield features of examples that a model of layers may have been trained on; none if it declares no inputs."""
    try:
        x, y = model.input, model.output
    except (AttributeError, ValueError):
        return

    def features(part: str, declared: Any, length: int, labels: str = "") -> Iterator[Feature]:
        if isinstance(declared, dict):
            for key, each in declared.items():
                yield from features(f"{part}/{key}", each, length, labels)
        elif isinstance(declared, list | tuple):
            for place, each in enumerate(declared):
                yield from features(f"{part}[{place}]", each, length, labels)
        else:
            shape = tuple(length if size is None else size for size in declared.shape[1:])
            shape = {"classes": shape[:-1], "column": (*shape[:-1], 1)}.get(labels, shape)
            yield Feature(name=part, dtype="int64" if labels else str(declared.dtype), shape=shape)

    for length in _LENGTHS:
        for labels in ("", "classes", "column"):
            yield (*features("x", x, length), *features("y", y, length, labels))


def one_replica_as_it_is(recorded: Environment) -> Accelerator:
    """The device that TensorFlow uses in this process, whose settings stay as they are; for a notebook.

    Keras's configuration becomes the run's: what the model computes depends on it.

    Raises:
        InvalidInput: Keras uses another backend in this process.
    """
    keep_keras_config(recorded.keras)
    environment = recorded.model_copy(update={"accelerator": "cpu", "replicas": 1, "hosts": 1})
    return Accelerator(strategy=tf.distribute.get_strategy(), environment=environment)


def _require_same_model(run: RunFile, head: Head, model: keras.Model, home: Storage, *, batch: int) -> None:
    """Refuse a run file that builds another model: its predictions would differ, even if the weights load."""
    now = model_identity(model, run.spec.model, run.folder, batch=batch)
    keys = [key for key in now if key.startswith("model.") and key in head.identity]
    recorded = {key: head.identity[key] for key in keys}
    if isinstance(options := recorded.get("model.options"), dict):
        # The length of the run, which a learning-rate schedule may use, does not change the predictions.
        function = load_function(run.spec.model.build, run.folder, seed=run.spec.train.seed)
        lengths = lengths_asked_for(run.spec, function)
        recorded["model.options"] = {name: value for name, value in options.items() if name not in lengths}
    found = differences(recorded, {key: now[key] for key in keys})
    if found:
        hints = []
        if head.environment.hash_seed not in {None, hash_seed()}:
            hints = [f"sets have another order in this process; start it with {HASH_SEED}={head.environment.hash_seed}"]
        what = (
            f"{run.path} builds another model than {home.uri} was trained with: {difference_words(found)}; use the "
            "run file and the code that the run was trained with"
        )
        raise InvalidInput(message(what, hints=hints))


# Keras finds objects of these packages itself.
_KERAS = frozenset({"keras", "keras_hub", "keras_cv", "keras_nlp", "builtins"})
_KERAS_FUNCTIONS = (keras.activations, keras.initializers, keras.losses, keras.metrics, keras.regularizers)
_FUNCTION, _LAMBDA = "function", "__lambda__"


@dataclass(frozen=True, slots=True, order=True)
class CustomObject:
    """A class or function in a file's configuration that does not belong to Keras."""

    key: str  # the name that Keras looks up
    name: str
    module: str  # empty for a function that is not at the top level of the user's code

    @property
    def registered(self) -> bool:
        """Whether importing its module is enough for Keras to find it."""
        return ">" in self.key

    @property
    def importable(self) -> bool:
        """Whether its module has it at the top level, not inside a function or a class."""
        return hasattr(sys.modules.get(self.module), self.name)


@dataclass(frozen=True, slots=True)
class Loading:
    """What is needed to load one file.

    Attributes:
        objects: objects to import first, sorted, each once.
        needs_unsafe_mode: whether the file holds a lambda as code, which Keras loads only with safe_mode=False.
        uncompiled: what no import finds of the loss, the metrics and the optimizer; then they are not loaded.
    """

    objects: tuple[CustomObject, ...]
    needs_unsafe_mode: bool
    uncompiled: tuple[str, ...] = ()

    @classmethod
    def of(cls, file: Path, reference: str) -> "Loading":
        """For a `.keras` file whose model this process built with the function `reference` of the run file."""
        with zipfile.ZipFile(file) as archive:
            config = json.loads(archive.read("config.json"))
        whole = cls.of_config(config, reference)
        model = cls.of_config({key: value for key, value in config.items() if key != "compile_config"}, reference)
        hidden = tuple(each.name for each in whole.objects if not each.importable)
        if not hidden or not all(each.importable for each in model.objects):
            return whole
        return replace(model, uncompiled=hidden)

    @classmethod
    def of_config(cls, config: Any, reference: str) -> "Loading":
        """For the configuration in a file."""
        return cls(tuple(sorted(set(_custom(config, _functions_of_user(reference))))), _holds_a_lambda(config))

    def lines(self, path: Path, *, here: Path) -> tuple[str, ...]:
        """Lines of Python that load the file at `path` without Baton, run in the folder `here`."""
        folders: dict[str, None] = {}
        imports: dict[str, dict[str, None]] = {}
        for each in filter(lambda each: each.importable, self.objects):
            folder, module = _importable(each.module)
            if folder is not None and folder != here.resolve():
                folders[str(folder)] = None
            imports.setdefault(module, {})[each.name] = None
        given = [f"{each.key!r}: {each.name}" for each in self.objects if not each.registered]
        arguments = [
            repr(str(path)),
            *([f"custom_objects={{{', '.join(given)}}}"] if given else []),
            *(["safe_mode=False"] if self.needs_unsafe_mode else []),
            *(["compile=False"] if self.uncompiled else []),
        ]
        odd = [module for module in imports if not all(map(str.isidentifier, module.split(".")))]  # a folder's name
        return (
            *(["import sys"] if folders else []),
            *(["import importlib"] if odd else []),
            *(f"sys.path.insert(0, {folder!r})" for folder in folders),
            *(f"from {module} import {', '.join(names)}" for module, names in imports.items() if module not in odd),
            *(f"{name} = importlib.import_module({each!r}).{name}" for each in odd for name in imports[each]),
            *(["import keras"] if imports else []),
            f"keras.saving.load_model({', '.join(arguments)})",
        )

    def warnings(self) -> Iterator[str]:
        """Messages about objects that Keras does not find, with remedies."""
        unregistered = [each for each in self.objects if not each.registered]
        if unregistered:
            names = ", ".join(dict.fromkeys(each.name for each in unregistered))
            yield (
                f"{names}: not registered with Keras, so keras.saving.load_model needs custom_objects; decorate them "
                "with @keras.saving.register_keras_serializable(), then importing them is enough"
            )
        keys = [each.key for each in unregistered]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            yield (
                f"{', '.join(twice)}: several classes have this name, and Keras uses one of them for all; register "
                'each under a different name: @keras.saving.register_keras_serializable(name="...")'
            )
        hidden = [each.name for each in self.objects if not each.importable]
        if hidden:
            yield (
                f"{', '.join(hidden)}: defined inside a function or class, where no import finds it; move it to the "
                "top level of its module"
            )
        if self.uncompiled:
            yield (
                f"{', '.join(self.uncompiled)}: defined inside a function or class, where no import finds it, so the "
                "model is loaded without loss, metrics and optimizer; move it to the top level of its module"
            )
        if self.needs_unsafe_mode:
            yield "a lambda is stored as code, so Keras needs safe_mode=False; use a named function instead"


def _custom(value: Any, functions: dict[str, CustomObject]) -> Iterator[CustomObject]:
    if isinstance(value, dict):
        module, name = str(value.get("module") or ""), str(value.get("class_name") or "")
        if name == _FUNCTION:  # the file does not name its module
            key = str(value.get("config"))
            if key in functions:
                yield functions[key]
            elif not any(hasattr(module, key) for module in _KERAS_FUNCTIONS):
                yield CustomObject(key, key.rpartition(">")[2], "")
        elif name and module and not name.startswith("__") and module.partition(".")[0] not in _KERAS:
            yield CustomObject(str(value.get("registered_name") or name), name, module)
        value = list(value.values())
    if isinstance(value, list):
        for below in value:
            yield from _custom(below, functions)


def _functions_of_user(reference: str) -> dict[str, CustomObject]:
    """Top-level functions of the user's modules, by the names that Keras stores."""
    package = "" if ".py:" in reference else reference.partition(":")[0].partition(".")[0]
    found = {}
    for name, module in list(sys.modules.items()):
        root = name.partition(".")[0]
        if not root.startswith(USER_PACKAGE_PREFIX) and root != package:
            continue
        for value in list(vars(module).values()):
            if isinstance(value, FunctionType) and value.__module__ == name:
                key = keras.saving.get_registered_name(value)
                found[key] = CustomObject(key, value.__name__, name)
    return found


def _holds_a_lambda(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("class_name") == _LAMBDA or any(map(_holds_a_lambda, value.values()))
    return isinstance(value, list) and any(map(_holds_a_lambda, value))


def _importable(module: str) -> tuple[Path | None, str]:
    """The folder to add to Python's path, and the module's name there.

    Baton loads a file beside the run file as a module of a private package. Plain Python needs its folder.
    """
    package, _, name = module.partition(".")
    if not package.startswith(USER_PACKAGE_PREFIX):
        return None, module
    file = Path(str(sys.modules[module].__file__))
    if _imports_siblings(file):  # relative imports need a package
        return file.parent.parent, f"{file.parent.name}.{name}"
    return file.parent, name


def _imports_siblings(file: Path) -> bool:
    tree = ast.parse(file.read_bytes())
    return any(isinstance(node, ast.ImportFrom) and node.level > 0 for node in ast.walk(tree))


# Prefix of the file names of an exported checkpoint.
PREFIX = "ckpt"
# What to load in the folder of an export.
_INSIDE = {"checkpoint": PREFIX, "openvino": OPENVINO_MODEL}
_CALLS = {
    "weights": "model.load_weights({path!r})",
    "saved_model": "model = tf.saved_model.load({path!r}); model.serve(x)",
    "checkpoint": "tf.train.Checkpoint(model=model).read({path!r})",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """An export.

    Attributes:
        path: what to load: the file, the folder of a SavedModel, or the prefix of a checkpoint's files.
        serving: the JSON file that describes it.
        compared: how its predictions compare with the model's; None if it has none, or these could not be compared.
        warnings: problems that may occur when it is loaded.
        load_with: lines of Python that load it without Baton.
    """

    path: Path
    serving: Path
    compared: PredictionComparison | None
    warnings: tuple[str, ...]
    load_with: tuple[str, ...]


def export(
    run: RunFile,
    head: Head,
    ref: CheckpointRef,
    *,
    root: Storage,
    home: Storage,
    form: str,
    target: Path,
    tolerance: float | None = None,
    accelerator: Accelerator | None = None,
) -> Exported:
    """Export a committed checkpoint, with the averages of `use_ema`, as evaluation uses them.

    The model is built on the CPU with one replica, even if it was trained on other devices.

    Args:
        run: the run file; it must build the model that the run was trained with.
        root: storage root with the run's dataset; without it, see `restored_model`, predictions of zeros are compared.
        form: one of `FORMS`.
        target: a path that does not exist.
        tolerance: of predictions, see `serving.difference`; None: `TOLERANCE`.
        accelerator: where the model is built; None: the CPU with one replica, as the accelerator of this process.

    Raises:
        InvalidInput: the target or the form is not usable; or see `restored_model`.
        StateMismatch: the run file builds a model with other variables.
        DamagedCheckpoint: the checkpoint differs from its manifest.
        DamagedDataset: the dataset's manifest is damaged.
        ModelError: the model cannot be built, Keras cannot write it in this form, or what it wrote is not what was
            trained: a variable is missing, it cannot be loaded without Baton, or predicts something else.
        StorageError: the disk refused or failed.
    """
    require_free_target(form, target)
    given, tolerance = tolerance, require_runtime(form, tolerance)
    if accelerator is None:
        accelerator = acquire(AcceleratorSpec(kind="cpu"), head.environment, deterministic=run.spec.train.deterministic)
    restored = _restored(run, head, ref, root=root, home=home, accelerator=accelerator)
    state, model, features = restored.state, restored.state.model, restored.inputs.validation
    if form in RUNTIMES:
        require_no_text(features, form)
    inputs = model_inputs_of(model, features, form)
    newest = RunLog(home)
    logged = evaluation_of(newest, newest.require_head(), ref.path)
    reference = run.spec.model.build
    examples = partial(_examples, run, head, restored, root)
    computed = {layer.compute_dtype for _, layer in named_layers(model)}
    rounds = bool(computed & {"float16", "bfloat16"}) or any(_merged(model, form))
    if given is None and form not in RUNTIMES and rounds:
        tolerance = TOLERANCE_OF_ROUNDED
    compared: PredictionComparison | None
    with atomic_target(form, target) as path:
        if form in RUNTIMES:
            x, doubts = examples()
            compared = write_for_runtime(
                model, inputs, x, form=form, path=path, tolerance=tolerance, reference=reference
            )
        else:
            compared, doubts = _write_and_read_back(run, state, examples, form=form, path=path, tolerance=tolerance)
        loading = Loading.of(path, reference) if form == "keras" else None
        facts = {
            "run": run.spec.run,
            "step": ref.step,
            "checkpoint": f"{home.uri}/{ref.path}",
            "state_digest": ref.state_digest,
            "export": form,
            "class_names": () if restored.manifest is None else restored.manifest.class_names,
        }
        metrics = {} if logged is None else logged.metrics
        taken = inputs_of_saved_model(path) if form == "saved_model" else inputs.values()
        serving_path(form, path).write_bytes(serving_json(facts, taken, compared, metrics))
    written = target / _INSIDE[form] if form in _INSIDE else target
    if loading is not None:
        lines, doubts = loading.lines(written, here=Path.cwd()), (*doubts, *loading.warnings())
    elif form in RUNTIMES:
        lines = load_lines(form, written, inputs.values())
    else:
        lines = (_CALLS[form].format(path=str(written)),)
    serving = serving_path(form, target)
    return Exported(path=written, serving=serving, compared=compared, warnings=doubts, load_with=lines)


# Inputs of a model, [examples, ...], and warnings.
_Examples = tuple[Any, tuple[str, ...]]


def _examples(run: RunFile, head: Head, restored: _Restored, root: Storage) -> _Examples:
    """Inputs of the first validation examples; or zeros, and a warning, if the dataset is missing or damaged."""
    # A model with a fixed batch size predicts no other one.
    fixed = restored.batch_size if has_fixed_batch_size(restored.state.model) else None
    try:
        if restored.manifest is None:
            raise DamagedDataset(f"{root.uri}/{head.identity['data.folder']} is missing")
        x = _first_examples(run, head, restored.manifest, restored.inputs, root=root, count=fixed or COMPARED)
    except BatonError as fault:
        zeros = zero_examples(restored.inputs.validation, fixed or COMPARED)[0]
        text = f"predictions were compared on zeros and not on validation examples: {fault}"
        return tf.nest.map_structure(tf.constant, zeros), (text,)
    if fixed is not None:
        x = tf.nest.map_structure(lambda values: tf.gather(values, np.arange(fixed) % len(values)), x)
    return x, ()


def _first_examples(
    run: RunFile, head: Head, manifest: DatasetManifest, inputs: ModelInputs, *, root: Storage, count: int
) -> Any:
    """Inputs of the first validation examples, or without any of the first training examples."""
    folder = head.identity["data.folder"]
    own, function = head.identity.get("data.validation_folder"), inputs.validation_function
    if own is None and not manifest.validation_examples:
        own = folder
        function = None if inputs.training_functions is None else inputs.training_functions.example
    found = manifest if own in {None, folder} else read_manifest(root, own)
    examples = manifest.validation_examples if own is None else found.train_examples
    dataset = DatasetRef(
        folder=folder,
        content_digest=manifest.content_digest,
        train_examples=manifest.train_examples,
        validation_examples=manifest.validation_examples,
        already_prepared=True,
        validation=None
        if own is None
        else SetRef(folder=own, content_digest=found.content_digest, examples=found.train_examples),
    )
    count = min(count, examples)
    batches = set_batches(root, dataset, on="validation", batch_size=count, function=function, seed=run.spec.train.seed)
    with original_read_errors():
        return next(iter(batches))[0]


_WEIGHTS = ("model/", "variables/")


def _write_and_read_back(
    run: RunFile, state: TrainState, examples: Callable[[], _Examples], *, form: str, path: Path, tolerance: float
) -> tuple[PredictionComparison | None, tuple[str, ...]]:
    """Write a form of Keras or TensorFlow, and compare it; if it is refused, find one that holds the model.

    Returns:
        How its predictions compare; and warnings.

    Raises:
        ModelError: Keras cannot write it, or what it wrote is not the model.
    """

    def attempt(form: str, path: Path) -> tuple[PredictionComparison | None, tuple[str, ...]]:
        _write(state.model, form, path, reference=run.spec.model.build)
        _require_all_variables(state, form, path, reference=run.spec.model.build)
        if form in VALUES:
            return None, tuple(_merged(state.model, form))
        x, doubts = examples()
        compared, more = _compare_elsewhere(run, state, x, form=form, path=path, tolerance=tolerance)
        return compared, (*_merged(state.model, form), *doubts, *more)

    try:
        return attempt(form, path)
    except ModelError as fault:
        for other in ("keras", "saved_model", "checkpoint", "weights"):
            with temporary_folder("baton-export-") as scratch, suppress(ModelError):
                if other != form:
                    attempt(other, scratch / f"export{ENDINGS.get(other, '')}")
                    hints: list[str] = ["use " + option("format", other) + ": it was tried, and is what was trained"]
                    break
        else:
            hints = ["no other format of Keras or TensorFlow holds this model either"]
        raise ModelError(message(str(fault), hints=hints)) from fault


def _write(model: keras.Model, form: str, path: Path, *, reference: str) -> None:
    try:
        match form:
            case "keras":
                model.save(path)
            case "weights":
                model.save_weights(path)
            case "saved_model":
                model.export(path, verbose=False)
            case _:
                tf.train.Checkpoint(model=model).write(str(path / PREFIX))
    except OSError:
        raise
    except Exception as fault:
        raise ModelError(user_error(f"{reference}: Keras cannot write this model as {form}:", fault)) from fault


def _require_all_variables(state: TrainState, form: str, path: Path, *, reference: str) -> None:
    """Load a file into the model again, whose variables have other values, and refuse it if one of them keeps these.

    Keras says nothing of sublayers that it does not find, nor TensorFlow of variables.
    """
    model = state.model
    weights = {leaf.path: leaf for leaf in state.leaves if leaf.path.startswith(_WEIGHTS) and not leaf.seed}
    # A SavedModel has what it computes with. What Keras knows of is compared where the file is loaded as a model.
    if form == "saved_model" or (form == "keras" and not any(path.startswith(_WEIGHTS[1]) for path in weights)):
        return

    def load() -> None:
        if form == "checkpoint":
            tf.train.Checkpoint(model=model).read(str(path / PREFIX)).expect_partial()
        else:
            model.load_weights(path)

    try:
        found = values_in_file(weights, state.leaves, load)
    except Exception as fault:
        raise ModelError(user_error(f"{reference}: Keras cannot load this model from {form}:", fault)) from fault
    mine = {id(leaf.variable) for leaf in weights.values()}
    merged, tracked = (set[int](), _tracked(model)) if form == "checkpoint" else (_merging(model), mine)
    # Merged, the variables of a layer have other values together; none, if the file has nothing for the layer.
    loaded = {name.rpartition("/")[0] for name in found}
    merged -= {id(leaf.variable) for name, leaf in weights.items() if name.rpartition("/")[0] not in loaded}
    lost = [
        name
        for name, leaf in weights.items()
        if id(leaf.variable) not in merged
        if name not in found
        or found[name].tobytes() != leaf.variable.numpy().tobytes()
        or id(leaf.variable) not in tracked
    ]
    _refuse_lost(lost, form, reference)


def _tracked(model: keras.Model) -> set[int]:
    """Ids of what `tf.train.Checkpoint` finds in a model whose optimizer is not built yet, as a new one."""
    found: dict[int, Any] = {}  # kept, so that no other object gets the id
    waiting: list[Any] = [model]
    while waiting:
        each = waiting.pop()
        if id(each) not in found and not isinstance(each, keras.optimizers.Optimizer):
            found[id(each)] = each
            waiting += tf.train.TrackableView.children(each).values()
    return {id(each.value) if isinstance(each, keras.Variable) else key for key, each in found.items()}


def _merging(model: keras.Model) -> set[int]:
    """Ids of the variables that Keras saves as one: those of a layer with adapters of LoRA."""
    layers = [layer for _, layer in named_layers(model) if getattr(layer, "lora_enabled", False)]
    return {id(variable.value) for layer in layers for variable in layer.variables}


def _refuse_lost(lost: Sequence[str], form: str, reference: str) -> None:
    if not lost:
        return
    lost = [path.partition("/")[2] for path in lost]
    layers = listed(list(dict.fromkeys(name.rpartition("/")[0] or name for name in lost)))
    found = "Keras saves layers in attributes without an underscore, and what save_own_variables stores"
    if form == "checkpoint":
        found = "TensorFlow finds layers in attributes, but none in lists and dicts of a layer"
    raise ModelError(
        message(
            f"{reference}: as {form} this model loses {counted(len(lost), 'variable')} of {layers}: {listed(lost)}; "
            "nothing was written",
            hints=[found],
        )
    )


def _predictions(model: keras.Model, x: Any) -> tuple[list[Any] | None, tuple[str, ...]]:
    """The arrays that a model predicts; or None, and why these cannot be compared."""
    try:
        found, again = (
            [np.asarray(each) for each in tf.nest.flatten(model(x, training=False), expand_composites=True)]
            for _ in range(2)
        )
    except Exception as fault:  # noqa: BLE001 - it may take something else than its train_step
        return None, (user_error("predictions were not compared: the model raised", fault),)
    if any(map(difference, found, again)):
        return None, ("predictions were not compared: the model predicts something else each time",)
    return found, ()


def _compare_elsewhere(
    run: RunFile, state: TrainState, x: Any, *, form: str, path: Path, tolerance: float
) -> tuple[PredictionComparison | None, tuple[str, ...]]:
    """Compare variables and predictions with those of a plain Python process that loads the file."""
    model, reference = state.model, run.spec.model.build
    loading = Loading.of(path, reference) if form == "keras" else None
    lines: tuple[str, ...] = ("import tensorflow as tf", f"tf.saved_model.load({str(path)!r})")
    if loading is not None:
        lines = loading.lines(path, here=path)
    merged = _merging(model) if form == "keras" else set()
    digests = {
        leaf.path: hashlib.sha256(leaf.variable.numpy().tobytes()).hexdigest()
        for leaf in state.leaves
        if leaf.path.startswith(_WEIGHTS[0]) and not leaf.seed and id(leaf.variable) not in merged
    }
    expected, doubts = _predictions(model, x)  # changes the variables of a model that remembers batches
    try:
        found = read_back(lines, None if expected is None else x, folder=run.folder)
    except ModelError as fault:
        hints = () if loading is None else tuple(loading.warnings())
        what = f"{reference}: as {form} this model cannot be loaded in plain Python: {abridged(str(fault), 300)}"
        raise ModelError(message(f"{what}; nothing was written", hints=hints)) from fault
    theirs = Counter(found.variables)
    theirs.subtract(digests.values())
    lost = [path for path, digest in digests.items() if theirs[digest] < 0]
    _refuse_lost(lost, form, reference)
    if expected is None or found.outputs is None:
        return None, doubts
    worst = math.inf
    if len(expected) == len(found.outputs):
        worst = max(map(difference, expected, found.outputs), default=0.0)
    examples = len(tf.nest.flatten(x)[0])
    require_close(worst, form=form, examples=examples, tolerance=tolerance, reference=reference)
    outputs = tuple(
        Value(name=f"output_{place}", shape=(None, *each.shape[1:]), dtype=each.dtype.name)
        for place, each in enumerate(expected)
    )
    return PredictionComparison(
        examples=examples, largest_difference=worst, tolerance=tolerance, outputs=outputs
    ), doubts


def _merged(model: keras.Model, form: str) -> Iterator[str]:
    """A warning about quantized layers with LoRA: Keras saves the sum of kernel and adapters, rounded once more."""
    names = [
        path
        for path, layer in named_layers(model)
        if getattr(layer, "lora_enabled", False) and getattr(layer, "quantization_mode", None)
    ]
    if form in {"keras", "weights"} and names:
        yield (
            f"{listed(names)}: Keras merges the adapters into the quantized kernels, which rounds them, so predictions "
            "differ a little; --format saved_model keeps them apart"
        )
