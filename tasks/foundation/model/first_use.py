"""Creates what a custom train step creates at its first use, as Keras does: layers' variables, metrics, optimizers.

Keras traces `train_step` with the first batch. Layers that are called for the first time create their variables, and an
optimizer is built with the variables that it is first applied to. Here the step is traced into a graph that is thrown
away, outside of any replica, because a replica cannot create variables. Nothing runs, so no value changes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras import tree
from keras.src.backend.tensorflow import core  # no public call says where Keras creates variables
from keras.src.optimizers import base_optimizer  # optimizers inherit `apply` from it
from tensorflow.python.distribute import values_util  # what variables of several replicas do outside of them

from tasks.foundation.accelerator.strategy import DEVICE_LOST_ERRORS, Accelerator
from tasks.foundation.errors import ModelError
from tasks.foundation.model.keras_steps import called_like_fit
from tasks.foundation.model.variables import layers_of, other_optimizers
from tasks.foundation.user_errors import describe_with_place


def all_layers_are_built(model: keras.Model) -> bool:
    """Whether all layers of a model have their variables; the model itself need not be built."""
    return all(layer.built for layer in layers_of(model) if layer is not model)


def optimizers_are_built(model: keras.Model) -> bool:
    """Whether all optimizers but the compiled one have their variables."""
    return all(optimizer.built for optimizer in other_optimizers(model).values())


def metrics_are_built(model: keras.Model) -> bool:
    """Whether all metrics of a model have their variables."""
    return all(getattr(metric, "built", True) for metric in model.metrics)


@contextmanager
def added_once() -> Iterator[None]:
    """Within the block, what code outside of a replica adds to a sum over replicas is added once.

    TensorFlow refuses it, although a layer that counts its calls, and an own train step, may do it when the model is
    used for the first time. The first replica's part takes it, so the sum is that of one replica.
    """

    def adding(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def add(variable: Any, value: Any, read_value: bool = True) -> Any:
            if variable.aggregation != tf.VariableAggregation.SUM:
                return original(variable, value, read_value=read_value)
            getattr(variable.values[0], name)(value)
            return variable.read_value() if read_value else None

        return add

    with ExitStack() as put_back:
        for name in ("assign_add", "assign_sub"):
            function = f"on_read_{name}_cross_replica"
            original = getattr(values_util, function)
            put_back.callback(setattr, values_util, function, original)
            setattr(values_util, function, adding(name, original))
        yield


class FirstUse:
    """The first use of a model's own train step, which is taken at most once.

    Attributes:
        fault: why the step could not be traced, as one line; "" if it was, or was not tried.
        applied: the variables that the compiled optimizer was applied to.
    """

    def __init__(self, model: keras.Model, batch: Sequence[Any], accelerator: Accelerator) -> None:
        """Nothing is traced yet.

        Args:
            model: compiled, with its own train_step.
            batch: see `create_variables`.
            accelerator: the variables are created in its strategy's scope.
        """
        self._model = model
        self._batch = batch
        self._strategy = accelerator.strategy
        self._is_taken = False
        self.fault = ""
        self.applied: list[Any] = []

    def take(self) -> bool:
        """Trace the step if that has not been done. Returns whether it succeeded."""
        if not self._is_taken:
            self._is_taken = True
            try:
                self._trace()
            except DEVICE_LOST_ERRORS:
                raise
            except (Exception, SystemExit) as fault:  # noqa: BLE001 - user code may raise anything
                self.fault = describe_with_place(fault)
        return not self.fault

    def require_created(self, reference: str, *, has_call: bool) -> None:
        """Refuse a model that still lacks variables because its step could not be traced.

        Args:
            reference: the function's name in the run file, for messages.
            has_call: whether the model has a `call`, which may create the variables of layers.

        Raises:
            ModelError: names the optimizers that are not built, or why the step cannot be traced.
        """
        if not self.fault:
            return
        unbuilt = [path for path, each in other_optimizers(self._model).items() if not each.built]
        if unbuilt:
            attributes = ", ".join(".".join(["model", *path.split("/")[1:]]) for path in unbuilt)
            raise ModelError(
                f"{reference}: {attributes} is not built, and train_step cannot build it at its first use: "
                f"{self.fault}; call optimizer.build(variables) in the function that builds the model"
            )
        if not (has_call or all_layers_are_built(self._model)):
            raise ModelError(f"{reference}: train_step cannot be traced: {self.fault}")

    def _trace(self) -> None:
        autograph = tf.__internal__.autograph
        step = autograph.tf_convert(called_like_fit(self._model.train_step), autograph.control_status_ctx())
        graph = tf.__internal__.FuncGraph("first_use")
        with self._strategy.scope(), graph.as_default(), self._variables_are_created():
            step(tree.map_structure(_placeholder, tuple(self._batch)))

    @contextmanager
    def _variables_are_created(self) -> Iterator[None]:
        """Within the block, variables are created outside of the graph; optimizers that are applied are built."""

        def apply(optimizer: Any, grads: Any, trainable_variables: Any = None) -> None:
            del grads
            variables = list(trainable_variables or ())
            if optimizer is self._model.optimizer:
                self.applied.extend(variables)
            elif not optimizer.built:
                with keras.name_scope(optimizer.name):
                    optimizer.build(variables)

        create = core.Variable._initialize

        def create_outside(variable: Any, value: Any) -> None:
            with tf.init_scope():  # a strategy with several replicas creates no variables in a graph
                create(variable, value)

        replacements = (
            (tf.GradientTape, "gradient", _zeros),
            (base_optimizer.BaseOptimizer, "apply", apply),
            (keras.optimizers.LossScaleOptimizer, "apply", apply),
            (core.Variable, "_initialize", create_outside),
        )
        with ExitStack() as put_back:
            for kind, name, function in replacements:
                put_back.callback(setattr, kind, name, getattr(kind, name))
                setattr(kind, name, function)
            yield


def _zeros(tape: Any, target: Any, sources: Any, *settings: Any, **more: Any) -> Any:
    """Gradients of the right shapes; outside of a replica, TensorFlow computes none of distributed variables."""
    del tape, target, settings, more
    return tree.map_structure(lambda source: tf.zeros_like(tf.convert_to_tensor(source)), sources)


def _placeholder(value: Any) -> Any:
    return tf.compat.v1.placeholder(value.dtype, value.shape)
