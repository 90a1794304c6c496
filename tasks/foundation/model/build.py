"""Builds the user's model with all its variables, in the way that the model needs.

A build is isolated from other work: it seeds all random generators, clears Keras's global state, and has the dtype
policy of `train.precision`. Variables stay float32 whatever the policy.

Learning-rate schedules often depend on the steps of an epoch or of the whole run. A build function that has a parameter
named `steps_per_epoch` or `train_steps` gets them. They are recorded with `model.options`, so a run whose schedule
would change with another target is refused, as for any other change of these arguments.

A layer that is built on its first call records the shape of that call. The first dimension is the per-replica batch
size, so batch sizes that the author fixed are kept apart from it; else the same model would look like another one on
another number of replicas.
"""

import copy
import inspect
import linecache
import logging
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf
from keras import tree
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from tensorflow.python.data.ops import debug_mode
from tensorflow.python.eager import context
from tensorflow.python.framework import config

from baton.tasks.foundation.contracts.log_entry import KerasConfig
from baton.tasks.foundation.contracts.run_spec import RunSpec, TrainSpec
from baton.tasks.foundation.errors import ModelError
from baton.tasks.foundation.keras_config import (
    dtype_policy_for_imports,
    kept_keras_config_put_back,
    keras_config,
    keras_config_for_build,
    set_keras_config,
)
from baton.tasks.foundation.machine.devices import DEVICE_LOST_ERRORS, Accelerator
from baton.tasks.foundation.model.hidden_state import require_no_hidden_state
from baton.tasks.foundation.model.keras_steps import called_like_fit, overrides, reset_metrics
from baton.tasks.foundation.model.randomness import StepDraws, exact_draws, require_exact_draws
from baton.tasks.foundation.model.step import (
    FirstUse,
    added_once,
    all_layers_are_built,
    jit_compile_kept,
    metrics_are_built,
    optimizers_are_built,
)
from baton.tasks.foundation.model.variables import freeze, layers_of, named_layers, with_inner_optimizers
from baton.tasks.foundation.seeding import keras_seeds_from
from baton.tasks.foundation.text import message
from baton.tasks.foundation.user_functions import in_user_folder, load_function, without_debug_modes
from baton.tasks.foundation.user_traceback import user_error

_POLICIES: Final[Mapping[str, str]] = {"float32": "float32", "bfloat16": "mixed_bfloat16"}
_LENGTHS: Mapping[str, Callable[[RunSpec], int]] = {
    "steps_per_epoch": lambda spec: spec.train.epoch.steps,
    "train_steps": lambda spec: spec.train.target,
}
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_SHAPES = {"batch_shape", "build_input_shape"}
_BUILD = "build_config"
_BUILD_SHAPES = {"input_shape", "shapes_dict"}
# Whether the author of a model fixed a batch size. It must be recorded before the first call: afterwards Keras's own
# inputs look the same. A weak dictionary, because Baton adds no attributes to the user's model.
_fixed_batch_size: "WeakKeyDictionary[keras.Model, bool]" = WeakKeyDictionary()
_BUILD_HINT = "if call() does not take a batch, build the layers in the function that makes the model"


def _set_optimizer_options(options: dict[str, Any]) -> None:
    context.context()._optimizer_experimental_options = options  # the public call keeps those that it is not given
    tf.config.optimizer.set_experimental_options({})


# What the user's code may set of TensorFlow: how it is read, and set.
_TENSORFLOW_OPTIONS: Sequence[tuple[Callable[[], Any], Callable[[Any], Any]]] = (
    (tf.config.functions_run_eagerly, tf.config.run_functions_eagerly),
    (lambda: debug_mode.DEBUG_MODE, debug_mode.toggle_debug_mode),
    (
        config.is_op_determinism_enabled,
        lambda on: config.enable_op_determinism() if on else config.disable_op_determinism(),
    ),
    (tf.config.get_soft_device_placement, tf.config.set_soft_device_placement),
    (tf.config.experimental.tensor_float_32_execution_enabled, tf.config.experimental.enable_tensor_float_32_execution),
    (tf.config.optimizer.get_jit, lambda jit: tf.config.optimizer.set_jit(jit or False)),
    (lambda: dict(context.context()._optimizer_experimental_options), _set_optimizer_options),
)
# User modules that are imported already, which happens once per process.
_imported: set[tuple[str, Path]] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomStates:
    """The states of all random generators of the process, the dtype policy of the thread, and Keras's configuration.

    Code that is traced later than it was built, or in another thread, gets them back: what it draws while it is traced
    becomes part of the graph.
    """

    python: Any
    numpy: Any
    keras_source: Any
    keras_drawn: Any
    tensorflow_seed: int | None
    tensorflow_drawn: Any
    dtype_policy: Any
    keras_config: KerasConfig

    @classmethod
    def now(cls) -> "RandomStates":
        """The current states."""
        eager = context.context()
        drawn = getattr(eager, "_rng", None)
        source = seed_generator.python_random
        return cls(
            python=random.getstate(),
            numpy=np.random.get_state(),  # noqa: NPY002 - user code draws from the global generator
            keras_source=source,
            keras_drawn=source.getstate(),
            tensorflow_seed=eager._seed,
            tensorflow_drawn=None if drawn is None else drawn.getstate(),
            # Not `keras.config.dtype_policy()`, which fixes a policy where none is set.
            dtype_policy=global_state.get_global_attribute("dtype_policy"),
            keras_config=keras_config(),
        )

    def restore(self) -> None:
        """Set all generators, this thread's dtype policy and Keras's configuration to these states."""
        eager = context.context()
        seed_generator.python_random = self.keras_source
        self.keras_source.setstate(self.keras_drawn)
        random.setstate(self.python)  # after Keras's source, which may be the same generator
        np.random.set_state(self.numpy)  # noqa: NPY002
        eager._seed = self.tensorflow_seed
        if self.tensorflow_drawn is not None:
            eager._rng = random.Random()  # noqa: S311 - must be reproducible
            eager._rng.setstate(self.tensorflow_drawn)
        set_keras_config(self.keras_config)
        global_state.set_global_attribute("dtype_policy", self.dtype_policy)


@contextmanager
def preserved_random_states() -> Iterator[None]:
    """Restore the random generators, the dtype policy and Keras's configuration after the block."""
    states = RandomStates.now()
    try:
        yield
    finally:
        states.restore()


@contextmanager
def preserved_global_state() -> Iterator[None]:
    """Restore random generators and Keras's global state after the block.

    A user's `load` function that is being read must yield the same examples, although a model is built meanwhile.
    """
    of_keras = global_state.GLOBAL_STATE_TRACKER, global_state.GLOBAL_SETTINGS_TRACKER
    with preserved_random_states():
        try:
            yield
        finally:
            global_state.GLOBAL_STATE_TRACKER, global_state.GLOBAL_SETTINGS_TRACKER = of_keras


@contextmanager
def preserved_process() -> Iterator[None]:
    """Restore, after the block, the global state that a build and the user's code set in a process of somebody else.

    These are random generators, Keras's configuration and global state, debugging modes, determinism and optimizer
    options of TensorFlow, warnings, loggers, and the import path. TensorFlow's thread counts cannot be changed once it
    is initialized, so it is initialized first. Modules stay imported, and classes registered with Keras. TensorFlow's
    operations with a seed of their own begin their sequences anew: their position is in kernels that seeding clears.
    """
    context.context().ensure_initialized()
    options = [(get(), get, put) for get, put in _TENSORFLOW_OPTIONS]
    trackers = global_state.GLOBAL_STATE_TRACKER, global_state.GLOBAL_SETTINGS_TRACKER
    of_keras = [
        {
            name: copy.copy(value) if isinstance(value, dict | list | set) else value
            for name, value in vars(each).items()
        }
        for each in trackers
    ]
    path, items, disabled, errors, depth = (
        sys.path,
        sys.path[:],
        logging.root.manager.disable,
        np.geterr(),
        sys.getrecursionlimit(),
    )
    loggers = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    logs = [(each, each.level, each.disabled, each.propagate, each.handlers[:]) for each in (logging.root, *loggers)]
    try:
        with warnings.catch_warnings(), kept_keras_config_put_back(), preserved_global_state():
            yield
    finally:
        for tracker, values in zip(trackers, of_keras, strict=True):
            vars(tracker).clear()
            vars(tracker).update(values)
        for value, get, put in options:
            if get() != value:
                put(value)
        for logger, level, logger_disabled, propagate, handlers in logs:
            logger.setLevel(level)
            logger.disabled, logger.propagate, logger.handlers[:] = logger_disabled, propagate, handlers
        logging.disable(disabled)
        np.seterr(**errors)
        sys.setrecursionlimit(depth)
        sys.path, sys.path[:] = path, items


def dtype_policy_for_build(train: TrainSpec, of_module: Any, *, reference: str) -> Any:
    """Return the policy to set before the user's function is called.

    Args:
        train: with `precision`; None keeps the module's policy.
        of_module: the policy right after the module's import.
        reference: the function's name in the run file, for messages.

    Raises:
        ModelError: the module sets another policy itself.
    """
    if train.precision is None:
        return of_module
    wanted = _POLICIES[train.precision]
    if of_module.name not in {wanted, keras.config.floatx()}:
        raise _two_policies(train, of_module.name, reference)
    return wanted


def require_precision(model: keras.Model, train: TrainSpec, *, reference: str) -> None:
    """Check that the model computes in the precision that `train.precision` sets.

    Args:
        model: as the user's function returned it.
        train: with `precision`; None checks nothing.
        reference: the function's name in the run file, for messages.

    Raises:
        ModelError: the function sets another policy, or no layer uses the policy.
    """
    if train.precision is None:
        return
    now = keras.config.dtype_policy().name
    if now != _POLICIES[train.precision]:
        raise _two_policies(train, now, reference)
    # Nested models and inputs compute nothing themselves.
    computing = {
        layer.compute_dtype
        for layer in layers_of(model)
        if not isinstance(layer, keras.Model | keras.layers.InputLayer)
    }
    if computing and train.precision not in computing:
        raise ModelError(
            f"train.precision = {train.precision}, but no layer of {reference} computes in it; the layers compute in "
            f"{', '.join(sorted(map(str, computing)))}, because each was created or loaded with its own dtype; remove "
            "train.precision, or create the layers without dtype"
        )


def _two_policies(train: TrainSpec, other: str, reference: str) -> ModelError:
    return ModelError(
        f"train.precision = {train.precision}, but {reference} sets the dtype policy {other} itself; remove one of them"
    )


def build_arguments(spec: RunSpec, function: Callable[..., object]) -> dict[str, Any]:
    """Return the keyword arguments to call the user's build function with.

    Args:
        spec: the run file, with the number of training examples if the function asks for what depends on it.

    Returns:
        `model.options`, and `steps_per_epoch` (rounded up) and `train_steps` (the target) where the function has a
        parameter of that name and the options do not set it.
    """
    lengths = {name: _LENGTHS[name](spec) for name in lengths_asked_for(spec, function)}
    return {**spec.model.options, **lengths}


def lengths_asked_for(spec: RunSpec, function: Callable[..., object]) -> tuple[str, ...]:
    """Return the names of the lengths that the build function has a parameter for, and that no option sets."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some callables of C have none
        return ()
    return tuple(
        name
        for name in _LENGTHS
        if name in parameters and parameters[name].kind in _BY_NAME and name not in spec.model.options
    )


def asks_for_unknown_length(spec: RunSpec, code_folder: Path) -> bool:
    """Return whether the model cannot be built before the number of training examples is known. Imports user code.

    Raises:
        ModelError: the function cannot be loaded.
    """
    if spec.train.epoch_examples is not None:
        return False
    asked = lengths_asked_for(spec, load_function(spec.model.build, code_folder, seed=spec.train.seed))
    return "steps_per_epoch" in asked or ("train_steps" in asked and spec.train.known_target is None)


def recorded_arguments(spec: RunSpec, code_folder: Path) -> dict[str, Any]:
    """Return `build_arguments` of the function that the run file names, for the run's identity.

    Raises:
        ModelError: the function cannot be loaded.
    """
    return build_arguments(spec, load_function(spec.model.build, code_folder, seed=spec.train.seed))


def record_fixed_batch_size(model: keras.Model) -> None:
    """Record whether the model fixes a batch size; call before the model is called for the first time."""
    _fixed_batch_size[model] = any(_fixes_batch_size(layer) for _, layer in named_layers(model))


def has_fixed_batch_size(model: keras.Model) -> bool:
    """Whether the model has an input with a batch size, or a recurrent layer that keeps its state between batches."""
    return _fixed_batch_size.get(model, True)


def without_batch_sizes(config: Any) -> Any:
    """Return a model's configuration with null as the first dimension of every shape that a layer was built with."""
    if isinstance(config, list):
        return [without_batch_sizes(item) for item in config]
    if not isinstance(config, dict):
        return config
    return {key: _value(key, value) for key, value in config.items()}


def _value(key: str, value: Any) -> Any:
    if key in _SHAPES:
        return _without_first(value)
    if key == _BUILD and isinstance(value, dict):
        return {name: _without_first(below) if name in _BUILD_SHAPES else below for name, below in value.items()}
    return without_batch_sizes(value)


def _without_first(shape: Any) -> Any:
    if isinstance(shape, dict):
        return {name: _without_first(below) for name, below in shape.items()}
    if not isinstance(shape, list) or not shape:
        return shape
    if all(size is None or isinstance(size, int) for size in shape):
        return [None, *shape[1:]]
    return [_without_first(below) for below in shape]


def _fixes_batch_size(layer: keras.Layer) -> bool:
    if getattr(layer, "stateful", False) is True:
        return True
    return isinstance(layer, keras.layers.InputLayer) and layer.batch_shape[0] is not None


def build_model(spec: RunSpec, *, code_folder: Path, accelerator: Accelerator) -> keras.Model:
    """Call the user's function in the strategy's scope, with fresh automatic names and the run's seed.

    Args:
        spec: the run file; names the function and its options.
        accelerator: the strategy to build in.

    Returns:
        A compiled model; its variables may not exist yet, see `create_variables`.

    Raises:
        ModelError: the function raises, or returns anything other than a compiled `keras.Model`.
    """
    reference = spec.model.build
    function = _load_build_function(reference, code_folder, spec.train.seed)
    if isinstance(function, keras.Model):
        name = reference.partition(":")[2]
        raise ModelError(
            f"{reference} is a model, made when its file was imported; name a function that makes and compiles it, so "
            f"that it has the run's seed, precision and devices: def build_model(): ... return {name}"
        )
    # Automatic names count up within a process; starting from zero they are the same in every process. Clearing also
    # resets the dtype policy, so global settings and the seed come after it.
    keras.utils.clear_session(free_memory=False)
    set_keras_config(keras_config_for_build(code_folder))
    policy = dtype_policy_for_imports(code_folder) or keras.DTypePolicy(keras.config.floatx())
    keras.config.set_dtype_policy(dtype_policy_for_build(spec.train, policy, reference=reference))
    keras.utils.set_random_seed(spec.train.seed)
    source = random.Random(spec.train.seed)  # noqa: S311 - must be reproducible
    with accelerator.strategy.scope(), added_once(), keras_seeds_from(source), jit_compile_kept():
        try:
            with in_user_folder(code_folder), without_debug_modes(reference):
                model = function(**build_arguments(spec, function))
        except (*DEVICE_LOST_ERRORS, ModelError):
            raise
        except (Exception, SystemExit) as fault:
            raise ModelError(user_error(f"{reference} raised", fault)) from fault
    _require_same_floatx(keras_config_for_build(code_folder).floatx, function, reference)
    if not isinstance(model, keras.Model):
        raise ModelError(f"{reference} returned {type(model).__name__}; return a compiled keras.Model")
    if not model.compiled or model.optimizer is None:
        raise ModelError(f"{reference} returned a model that is not compiled; call model.compile(optimizer, loss)")
    record_fixed_batch_size(model)
    require_precision(model, spec.train, reference=reference)
    _refuse_unsupported_by_keras(model, reference, accelerator.replicas)
    return model


def create_variables(
    model: keras.Model,
    batch: Sequence[Any],
    *,
    reference: str,
    accelerator: Accelerator,
    freeze_patterns: Sequence[str] = (),
    train_step_first: bool = False,
) -> frozenset[int]:
    """Create all variables of a model, with public calls, before the training loop is traced.

    A lazy build fails inside `strategy.run`, and an optimizer that is built after a restore loses its restored state.

    Args:
        batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)` of NumPy arrays, [per_replica_batch, ...].
        reference: the function's name in the run file, for messages.
        accelerator: its strategy's scope holds the variables.
        freeze_patterns: patterns of `init.freeze`; the optimizer must be built after freezing.
        train_step_first: layers create their variables where the model's own train_step calls them first, and not
            where `call` does. Variables then have other paths, so this is for models that cannot be built otherwise.

    Returns:
        Ids of the frozen variables, see `freeze`.

    Raises:
        ModelError: the model does not take such a batch, or a pattern freezes nothing.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tuple(batch))
    own_step = overrides(model, "train_step")
    first_use = FirstUse(model, batch, accelerator)
    shapes = ", ".join(f"{name} {_shapes(value)}" for name, value in (("x", x), ("y", y)) if value is not None)
    with accelerator.strategy.scope(), added_once():
        predictions = None
        # Models without `call`, such as a pair of adversarial networks, are used by their own train_step only.
        has_call = not own_step or overrides(model, "call")
        if own_step and (train_step_first or not has_call) and not all_layers_are_built(model):
            first_use.take()
        if has_call:
            built = own_step and all_layers_are_built(model)
            try:
                with _as_model_error(f"{reference}: the model does not take a batch of {shapes}"):
                    predictions = model(x, training=False)
            except ModelError as fault:
                # `call` may take something other than a batch; then only train_step knows how to use it.
                if not (built or (own_step and first_use.take())):
                    raise ModelError(message(str(fault), hints=_first_use_hints(first_use))) from fault
        if own_step and not (all_layers_are_built(model) and optimizers_are_built(model)):
            first_use.take()
        frozen = freeze(model, freeze_patterns, reference=reference)
        optimized = _optimized(model, first_use)
        _require_made_in_scope(optimized, accelerator, reference)
        with _as_model_error(f"{reference}: its optimizer cannot be built"):
            model.optimizer.build(optimized)
        _use_loss_and_metrics(model, (x, y, sample_weight), predictions, first_use, reference=reference, shapes=shapes)
        reset_metrics(model)
        reset_metrics(model)  # what a reset changes in Python attributes is named here, before a run starts
    first_use.require_created(reference, has_call=has_call)
    return frozen


def _use_loss_and_metrics(
    model: keras.Model, parts: Sequence[Any], predictions: Any, first_use: FirstUse, *, reference: str, shapes: str
) -> None:
    """Compute the compiled loss and metrics once, which creates their variables.

    Raises:
        ModelError: they cannot be computed, and the model's own train_step does not compute them either.
    """
    x, y, sample_weight = parts
    own_step = overrides(model, "train_step")
    what = f"{reference}: its compiled loss and metrics cannot be computed from model(x) and y, with {shapes}"
    if own_step:
        what += "; with a custom train_step, keep the metrics as attributes of the model instead"
    # How a custom train_step uses y is unknown; try the usual call, as Keras does before `fit`.
    if predictions is not None and (y is not None or not own_step):
        try:
            with _as_model_error(what):
                model.compute_metrics(x, y, predictions, sample_weight=sample_weight)
                if model.loss is not None or not own_step:
                    compute_loss(model, x, y, predictions, sample_weight)
        except ModelError as fault:
            # Only train_step knows how it uses y.
            if not (own_step and first_use.take() and metrics_are_built(model)):
                raise ModelError(message(str(fault), hints=_labels_hints(model.loss, y, predictions))) from fault
    elif not metrics_are_built(model) and not (first_use.take() and metrics_are_built(model)):
        raise ModelError(
            f"{reference}: compile(metrics=…) needs metrics of model(x) and y, but the custom train_step uses its "
            "batch in another way; keep metrics as attributes of the model, and update them in train_step"
        )


def _labels_hints(loss: Any, y: Any, predictions: Any) -> list[str]:
    """What to do if the labels are missing, text, or in another form than the loss and the outputs."""
    if y is None:
        return ["the data has no labels; return x, y"]
    if getattr(getattr(y, "dtype", None), "kind", "") == "O":
        return ["y is text; number the classes: classes, y = np.unique(y, return_inverse=True)"]
    shape, words = tuple(getattr(y, "shape", ())), str(getattr(loss, "name", loss)).lower()
    if "categorical_crossentropy" in words and hasattr(predictions, "shape"):
        outputs = tuple(predictions.shape)
        if words.startswith("sparse") and shape == outputs:
            return ["y has a column for each class; return y.argmax(axis=-1), or compile categorical_crossentropy"]
        if not words.startswith("sparse") and shape in {outputs[:-1], (*outputs[:-1], 1)}:
            return ["y has the number of a class; compile sparse_categorical_crossentropy"]
    if not isinstance(predictions, list | tuple | dict) or shape[1:] != (len(predictions),):
        return []
    named = isinstance(predictions, dict)
    each = [f"{name!r}: {name}" if named else f"np.array([y{place}])" for place, name in enumerate(predictions)]
    labels = f"{{{', '.join(each)}}}" if named else f"({', '.join(each)})"
    return [f"numbers in a list or tuple are one array; for {len(each)} outputs, yield {labels} as y"]


def require_test_step(model: keras.Model, batch: Sequence[Any], *, reference: str, draws: StepDraws) -> None:
    """Check that a model with custom steps can be evaluated, before training starts.

    Args:
        batch: see `create_variables`.
        reference: the function's name in the run file, for messages.
        draws: seeds of the step's random operations; it is traced for their replicas.

    Raises:
        ModelError: `test_step` cannot be traced, uses state that is not saved, or has a random operation that cannot be
            made a function of the step.
    """
    steps = ("train_step", "test_step", "compute_loss", "compute_metrics")
    if not any(overrides(model, name) for name in steps):
        return
    what = (
        f"{reference}: its test_step cannot be traced, so it cannot be evaluated on validation examples; give the "
        "model a test_step, or set data.validation_fraction to 0"
    )
    with _as_model_error(what):
        function = trace_test_step(model, batch, draws)
    require_exact_draws(function, draws, f"{reference}: test_step")
    require_no_hidden_state(function, f"{reference}: test_step")


def trace_test_step(model: keras.Model, batch: Sequence[Any], draws: StepDraws) -> Any:
    """Trace `test_step` with a batch. It does not run, so no metric changes. Returns the concrete function."""
    test_step = called_like_fit(model.test_step)

    def on_replicas(*parts: Any) -> None:
        with exact_draws(draws):
            draws.accelerator.strategy.run(test_step, args=(parts,))

    arguments = tree.map_structure(tf.convert_to_tensor, tuple(batch))
    return tf.function(on_replicas, jit_compile=False).get_concrete_function(*arguments)


def _load_build_function(reference: str, code_folder: Path, seed: int) -> Callable[..., object]:
    """Return the user's function; its module is imported with the run's configuration of Keras."""
    module = (reference.partition(":")[0], code_folder)
    if module not in _imported:
        # An earlier build, or code that yields examples, may have set a policy for itself; this module must not see it.
        if _imported:
            keras.utils.clear_session(free_memory=False)
        set_keras_config(keras_config_for_build(code_folder))
        global_state.set_global_attribute("dtype_policy", dtype_policy_for_imports(code_folder))
    function = load_function(reference, code_folder, seed=seed)
    _imported.add(module)
    return function


def _require_same_floatx(before: str, function: Callable[..., object], reference: str) -> None:
    """Refuse a function that sets floatx: the dtype policy of its layers is fixed before, and so are the examples.

    Raises:
        ModelError: names the line.
    """
    now = keras.config.floatx()
    if now == before:
        return
    keras.config.set_floatx(before)
    place = _place_of_call(function, "set_floatx")
    raise ModelError(
        message(
            f"{reference} changes keras.config.floatx() from {before} to {now}{place}; "
            "the layers' dtype policy and the examples' dtype are fixed before it is called",
            hints=[
                f"call keras.config.set_floatx('{now}') at the top of {reference.partition(':')[0]}",
                f"call it at the top of the file of data.source too, if its arrays are to become {now}",
                f"or set only the dtype of the layers, in the function: keras.config.set_dtype_policy('{now}')",
            ],
        )
    )


def _place_of_call(function: Callable[..., object], name: str) -> str:
    """The line of a function's file that calls another by this name, in words; empty if none does."""
    try:
        file = inspect.getsourcefile(inspect.unwrap(function)) or ""
    except TypeError:
        return ""
    for number, line in enumerate(linecache.getlines(file), 1):
        if f"{name}(" in line.partition("#")[0]:
            return f" ({Path(file).name}, line {number}: {line.strip()})"
    return ""


def _first_use_hints(first_use: FirstUse) -> list[str]:
    return [_BUILD_HINT, f"train_step cannot create the variables either: {first_use.fault}"] if first_use.fault else []


def _optimized(model: keras.Model, first_use: FirstUse) -> list[Any]:
    """The variables to build the compiled optimizer with: the trainable ones, and others that it is applied to."""
    known = {id(variable) for variable in model.trainable_variables}
    others = {id(each): each for each in first_use.applied if id(each) not in known}
    return [*model.trainable_variables, *others.values()]


def _require_made_in_scope(variables: Iterable[Any], accelerator: Accelerator, reference: str) -> None:
    """Refuse variables that are on one device only, where several replicas need them.

    Raises:
        ModelError: names the first of them.
    """
    alone = [each.path for each in variables if not hasattr(each.value, "values")]
    if accelerator.strategy.num_replicas_in_sync > 1 and alone:  # the doctor has one replica, whatever is trained on
        raise ModelError(
            f"{reference}: {alone[0]} was made when its file was imported, so it is not on the {accelerator.replicas} "
            "replicas; make all layers within the function"
        )


def compute_loss(model: keras.Model, x: Any, y: Any, predictions: Any, sample_weight: Any) -> Any:
    """Call compute_loss as Keras does: a custom `compute_loss` may have no `training` parameter."""
    settings = {"training": False} if "training" in inspect.signature(model.compute_loss).parameters else {}
    return model.compute_loss(x=x, y=y, y_pred=predictions, sample_weight=sample_weight, **settings)


@contextmanager
def _as_model_error(what: str) -> Iterator[None]:
    try:
        yield
    except DEVICE_LOST_ERRORS:
        raise
    except (Exception, SystemExit) as fault:
        raise ModelError(user_error(f"{what}:", fault)) from fault


def _shapes(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shapes(below) for key, below in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_shapes, value))
    return f"{value.dtype}{list(value.shape)}"


def _refuse_unsupported_by_keras(model: keras.Model, reference: str, replicas: int) -> None:
    if replicas == 1:
        return
    if isinstance(optimizer := model.optimizer, keras.optimizers.LossScaleOptimizer):
        # It checks one replica's gradients for overflow before they are summed; another replica's overflow would pass.
        raise ModelError(
            f"{reference}: optimizer {optimizer.name} scales the loss, which Keras does incorrectly on {replicas} "
            "replicas; use the policy mixed_bfloat16, compile with auto_scale_loss=False, or train on one replica"
        )
    # Both fail to trace inside a replica ("merge_call called while defining a new graph").
    for setting, remedy in (
        ("gradient_accumulation_steps", "use a larger train.global_batch_size"),
        ("ema_overwrite_frequency", "remove it: use_ema works without it"),
    ):
        for optimizer in with_inner_optimizers(model.optimizer):
            if not (value := getattr(optimizer, setting, None)):
                continue
            raise ModelError(
                f"{reference}: optimizer {optimizer.name} has {setting} = {value}, which Keras does not support on "
                f"{replicas} replicas; {remedy}, or train on one replica"
            )


def build_with_variables(
    spec: RunSpec, batch: Sequence[Any], *, code_folder: Path, accelerator: Accelerator
) -> tuple[keras.Model, frozenset[int]]:
    """Build the model, and create all its variables.

    Layers that are not built create them in `call` with a batch. If that fails, and the model has its own train_step,
    another model is built, whose layers create them where train_step calls them, as in Keras's fit: `call` of an
    adversarial model may take noise, and its layers would get the shapes of the batch.

    Args:
        spec: names the function and the seed.
        batch: see `create_variables`.

    Returns:
        The model, and the ids of its frozen variables.

    Raises:
        ModelError: see `build_model` and `create_variables`.
    """

    def built(*, train_step_first: bool) -> tuple[keras.Model, frozenset[int]]:
        frozen = create_variables(
            model,
            batch,
            reference=spec.model.build,
            accelerator=accelerator,
            freeze_patterns=spec.init.freeze,
            train_step_first=train_step_first,
        )
        return model, frozen

    model = build_model(spec, code_folder=code_folder, accelerator=accelerator)
    can_be_built_by_train_step = overrides(model, "train_step") and not all_layers_are_built(model)
    try:
        return built(train_step_first=False)
    except ModelError as fault:
        if not can_be_built_by_train_step:
            raise
        model = build_model(spec, code_folder=code_folder, accelerator=accelerator)
        try:
            return built(train_step_first=True)
        except ModelError:
            raise fault from fault.__cause__
