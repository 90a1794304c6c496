"""TensorFlow's debugging modes, which a run's code may have left on.

They hold for the whole process, whoever switched them on, and they change what is traced or how it is computed: Baton's
loops would run in Python, checks would be part of the step, and a later process need not meet the line that did it. So
they are switched off, and the user is told.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tasks.foundation.errors import ModelError
from tasks.foundation.messages import listed

_LOGGER = logging.getLogger(__name__)
_OF_DATA = "tensorflow.python.data.ops.debug_mode"
_GRAPH_MODE = (
    "eager execution is off: the run's code called tf.compat.v1.disable_eager_execution() or disable_v2_behavior(); "
    "remove the call, since Keras 3 cannot train without it"
)


@contextmanager
def without_debug_modes(where: str) -> Iterator[None]:
    """Switch off the debugging modes that code within the block switches on, and warn.

    Args:
        where: the code, for the message.

    Raises:
        ModelError: it has switched eager execution off.
    """
    known = _modes()
    yield
    tf = sys.modules.get("tensorflow")
    if tf is not None and not tf.executing_eagerly() and not tf.inside_function():
        raise ModelError(f"{where}: {_GRAPH_MODE}")
    if not known:
        switch_off_debug_modes(where)


def switch_off_debug_modes(where: str = "the run's code") -> None:
    """Switch off all debugging modes of the process, and warn if one was on.

    Args:
        where: the code, for the message.
    """
    found = _modes()
    if not found:
        return
    tf = sys.modules["tensorflow"]
    tf.config.run_functions_eagerly(False)
    sys.modules[_OF_DATA].toggle_debug_mode(False)  # no public call switches it off
    tf.debugging.disable_check_numerics()
    tf.debugging.experimental.disable_dump_debug_info()
    _LOGGER.warning(
        "%s switched on %s, which would change what is traced and computed; it is off from here on, so remove the call",
        where,
        listed(found),
    )


def _modes() -> list[str]:
    """The debugging modes that are on, by the calls that switch them on; none before TensorFlow is imported."""
    tf, modules = sys.modules.get("tensorflow"), sys.modules
    if tf is None or not hasattr(tf, "debugging") or _OF_DATA not in modules:
        return []
    # The modes that watch operations are callbacks of the context; no public call says which are on.
    watching = modules["tensorflow.python.eager.context"].context().op_callbacks
    kinds = [f"{type(getattr(each, '__self__', each)).__module__}" for each in watching]
    modes = {
        "tf.config.run_functions_eagerly(True)": tf.config.functions_run_eagerly(),
        "tf.data.experimental.enable_debug_mode()": modules[_OF_DATA].DEBUG_MODE,
        "tf.debugging.enable_check_numerics()": any("check_numerics" in kind for kind in kinds),
        "tf.debugging.experimental.enable_dump_debug_info()": any("dumping" in kind for kind in kinds),
    }
    return [call for call, is_on in modes.items() if is_on]
