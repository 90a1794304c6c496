"""A committed checkpoint as a Keras file, weights, a SavedModel, a TensorFlow checkpoint, or for another runtime.

The run file builds the model, which must be the one that was trained, and the checkpoint is restored into it. With the
export come the lines of Python that load it without Baton, and `serving.json`: which checkpoint of which run it is, and
what the model takes. `serving.py` writes and compares the forms for other runtimes.
"""

import ast
import json
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from tasks.evaluate.evaluator import use_averages
from tasks.evaluate.export_target import (
    RUNTIMES,
    atomic_target,
    require_free_target,
    require_runtime,
    serving_path,
)
from tasks.evaluate.serving import (
    COMPARED,
    OPENVINO_MODEL,
    Comparison,
    inputs_of_saved_model,
    load_lines,
    model_inputs_of,
    require_no_text,
    serving_json,
    write_for_runtime,
)
from tasks.foundation.checkpoint.restore import restore_checkpoint
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.data_spec import SetRef
from tasks.foundation.contracts.dataset import DatasetManifest, DatasetRef
from tasks.foundation.contracts.identity import difference_words, differences
from tasks.foundation.contracts.log_entry import Environment, Head
from tasks.foundation.contracts.placement import AcceleratorSpec, per_replica_batch_size
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.contracts.run_spec import with_examples
from tasks.foundation.dataset.evaluation_sets import set_batches
from tasks.foundation.dataset.manifest import read_manifest, zero_examples
from tasks.foundation.dataset.model_inputs import ModelInputs, model_inputs
from tasks.foundation.dataset.shards import original_read_errors
from tasks.foundation.errors import InvalidInput, ModelError
from tasks.foundation.log.history import evaluation_of
from tasks.foundation.log.log import RunLog
from tasks.foundation.machine.devices import Accelerator, acquire
from tasks.foundation.machine.processes import HASH_SEED, hash_seed
from tasks.foundation.messages import listed, message
from tasks.foundation.model.build import lengths_asked_for
from tasks.foundation.model.model_identity import model_identity
from tasks.foundation.model.variables import named_layers
from tasks.foundation.state.train_state import build_train_state
from tasks.foundation.storage.interface import Storage
from tasks.foundation.user_code import keep_keras_config, load_function
from tasks.foundation.user_errors import USER_PACKAGE_PREFIX, user_error


def restored_model(
    run: RunFile, head: Head, ref: CheckpointRef, *, root: Storage, home: Storage, accelerator: Accelerator
) -> keras.Model:
    """Return the compiled model with the state of a checkpoint, and the averages of `use_ema`, as evaluation uses them.

    Args:
        run: the run file; it must build the model that the run was trained with.
        head: head of the run's log.
        ref: the checkpoint.
        root: storage root with the run's dataset, whose manifest has the shapes of the model's inputs.
        home: the run's home.
        accelerator: where the model is built.

    Raises:
        InvalidInput: the run file builds another model.
        StateMismatch: the run file builds a model with other variables.
        DamagedCheckpoint: the checkpoint differs from its manifest.
        DamagedDataset: the dataset's manifest is missing.
        ModelError: the model cannot be built.
    """
    manifest = read_manifest(root, head.identity["data.folder"])
    inputs = model_inputs(run.spec, manifest.features, run.folder)
    return _restored(run, head, ref, manifest, inputs, home=home, accelerator=accelerator)


def _restored(
    run: RunFile,
    head: Head,
    ref: CheckpointRef,
    manifest: DatasetManifest,
    inputs: ModelInputs,
    *,
    home: Storage,
    accelerator: Accelerator,
) -> keras.Model:
    batch_size = per_replica_batch_size(run.spec.train.global_batch_size, head.environment.replicas)
    batch = zero_examples(inputs.train, batch_size)
    spec = with_examples(run.spec, manifest.train_examples)
    state = build_train_state(spec, code_folder=run.folder, accelerator=accelerator, batch=batch)
    _require_same_model(run, head, state.model, home, batch=batch_size)
    restore_checkpoint(state, home, ref)
    use_averages(state.model)
    return state.model


def one_replica_as_it_is(recorded: Environment) -> Accelerator:
    """The device that TensorFlow uses in this process, whose settings stay as they are; for a notebook.

    Keras's configuration becomes the run's: what the model computes depends on it.

    Args:
        recorded: the run's recorded environment.

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
    """

    objects: tuple[CustomObject, ...]
    needs_unsafe_mode: bool

    @classmethod
    def of(cls, file: Path, reference: str) -> "Loading":
        """For a `.keras` file whose model this process built with the function `reference` of the run file."""
        with zipfile.ZipFile(file) as archive:
            return cls.of_config(json.loads(archive.read("config.json")), reference)

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
        ]
        return (
            *(["import sys"] if folders else []),
            *(f"sys.path.insert(0, {folder!r})" for folder in folders),
            *(f"from {module} import {', '.join(names)}" for module, names in imports.items()),
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
        compared: how its predictions compare with Keras's; None if it is a form of Keras or TensorFlow.
        warnings: problems that may occur when it is loaded.
        load_with: lines of Python that load it without Baton.
    """

    path: Path
    serving: Path
    compared: Comparison | None
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
        head: head of the run's log.
        ref: the checkpoint.
        root: storage root with the run's dataset, whose manifest has the shapes of the model's inputs.
        home: the run's home.
        form: one of `FORMS`.
        target: a path that does not exist.
        tolerance: of the forms for other runtimes, see `serving.difference`; None: `TOLERANCE`.
        accelerator: where the model is built; None: the CPU with one replica, as the accelerator of this process.

    Raises:
        InvalidInput: the target or the form is not usable, or the run file builds another model.
        StateMismatch: the run file builds a model with other variables.
        DamagedCheckpoint: the checkpoint differs from its manifest.
        DamagedDataset: the dataset's manifest, or what is predicted, is missing or damaged.
        ModelError: the model cannot be built, Keras cannot write it in this form, or its runtime predicts something
            else than Keras.
        StorageError: the disk refused or failed.
    """
    require_free_target(form, target)
    tolerance = require_runtime(form, tolerance)
    if accelerator is None:
        accelerator = acquire(AcceleratorSpec(kind="cpu"), head.environment, deterministic=run.spec.train.deterministic)
    manifest = read_manifest(root, head.identity["data.folder"])
    features = model_inputs(run.spec, manifest.features, run.folder)
    if form in RUNTIMES:
        require_no_text(features.validation, form)
    model = _restored(run, head, ref, manifest, features, home=home, accelerator=accelerator)
    inputs = model_inputs_of(model, features.validation, form)
    newest = RunLog(home)
    logged = evaluation_of(newest, newest.require_head(), ref.path)
    compared: Comparison | None = None
    with atomic_target(form, target) as path:
        if form in RUNTIMES:
            x = _first_examples(run, head, manifest, features, root)
            reference = run.spec.model.build
            compared = write_for_runtime(
                model, inputs, x, form=form, path=path, tolerance=tolerance, reference=reference
            )
        else:
            _write(model, form, path, reference=run.spec.model.build)
        loading = Loading.of(path, run.spec.model.build) if form == "keras" else None
        doubts = tuple(_untracked(model, str(path / PREFIX)) if form == "checkpoint" else _merged(model, form))
        facts = {
            "run": run.spec.run,
            "step": ref.step,
            "checkpoint": f"{home.uri}/{ref.path}",
            "state_digest": ref.state_digest,
            "export": form,
            "class_names": manifest.class_names,
        }
        metrics = {} if logged is None else logged.metrics
        taken = inputs_of_saved_model(path) if form == "saved_model" else inputs.values()
        serving_path(form, path).write_bytes(serving_json(facts, taken, compared, metrics))
    written = target / _INSIDE[form] if form in _INSIDE else target
    if loading is not None:
        lines, warnings = loading.lines(written, here=Path.cwd()), (*doubts, *loading.warnings())
    elif form in RUNTIMES:
        lines, warnings = load_lines(form, written, inputs.values()), ()
    else:
        lines, warnings = (_CALLS[form].format(path=str(written)),), doubts
    serving = serving_path(form, target)
    return Exported(path=written, serving=serving, compared=compared, warnings=warnings, load_with=lines)


def _first_examples(run: RunFile, head: Head, manifest: DatasetManifest, inputs: ModelInputs, root: Storage) -> Any:
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
    count = min(COMPARED, examples)
    batches = set_batches(root, dataset, on="validation", batch_size=count, function=function, seed=run.spec.train.seed)
    with original_read_errors():
        return next(iter(batches))[0]


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
        what = f"{reference}: Keras cannot write this model as {form}:"
        raise ModelError(user_error(what, fault, end="; try --format weights or checkpoint")) from fault


def _untracked(model: keras.Model, prefix: str) -> Iterator[str]:
    """A warning about variables that `tf.train.Checkpoint` misses, such as those of layers kept in a list."""
    reader = tf.train.load_checkpoint(prefix)
    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    graph.ParseFromString(reader.get_tensor("_CHECKPOINTABLE_OBJECT_GRAPH"))
    tracked = {attribute.full_name.partition(":")[0] for node in graph.nodes for attribute in node.attributes}
    missed = [variable.path for variable in model.variables if variable.path not in tracked]
    weights = [path for path in missed if not path.endswith("seed_generator_state")]
    if weights:
        yield (
            f"{listed(weights)}: not in the checkpoint, because tf.train.Checkpoint does not find them in this model; "
            "use --format keras or weights"
        )


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
