"""Explains what TensorFlow raises when it cannot read a checkpoint's files, although they are as they were written."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tensorflow as tf
from google.protobuf.message import DecodeError

from tasks.foundation.errors import DamagedCheckpoint
from tasks.foundation.messages import message

# Those of TensorFlow's reader, of its operations, of the object graph and of protocol buffers.
_OF_A_BUNDLE = (
    tf.errors.DataLossError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.OutOfRangeError,
    tf.errors.UnimplementedError,
    AssertionError,
    DecodeError,
    IndexError,
    ValueError,
)


@contextmanager
def bundle_errors(where: str, prefix: str) -> Iterator[None]:
    """Name the file that is no checkpoint's, whatever its digests say: somebody wrote it by hand.

    Args:
        where: address of the checkpoint.
        prefix: path prefix of its files on this machine.

    Raises:
        DamagedCheckpoint: they cannot be read, or were deleted meanwhile.
    """
    try:
        yield
    except (tf.errors.OpError, *_OF_A_BUNDLE) as fault:
        # The reader raises the base class where it knows no better; others are of lost devices and full memories.
        if not (isinstance(fault, _OF_A_BUNDLE) or type(fault) is tf.errors.OpError):
            raise
        index = Path(f"{prefix}.index")
        if not index.exists():
            # On a local home these are links: retiring the checkpoint deletes the files behind them.
            raise DamagedCheckpoint(f"{where}: a file was deleted while it was being read") from fault
        lines = str(fault).splitlines()
        raise DamagedCheckpoint(
            message(
                f"{where}/{index.name} is not the index of this checkpoint ({lines[0] if lines else fault}), although "
                "it has the digest in the manifest",
                hints=["Baton did not write it: take another checkpoint, or another home"],
            )
        ) from fault
