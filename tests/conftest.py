"""What all tests share: the helpers of support/, and one accelerator for the process."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parent / "support"))


@pytest.fixture(scope="session", autouse=True)
def _threads_before_tensorflow_is_used() -> None:
    """The first operation fixes TensorFlow's threads, so whatever test comes first, they are set before."""
    if "tensorflow" in sys.modules:
        from tasks.foundation.accelerator.strategy import acquire
        from tasks.foundation.contracts.run_spec import AcceleratorSpec

        acquire(AcceleratorSpec(), None)
