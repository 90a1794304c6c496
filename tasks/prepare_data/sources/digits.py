"""The source `digits`: the 1,797 handwritten digits of 8 x 8 pixels in scikit-learn."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from baton.tasks.foundation.errors import SourceError
from baton.tasks.prepare_data.sources.source import LocatedExample, Options, Source, parse_options

_EXAMPLES = 1797
_BRIGHTEST = 16


def digits(options: Mapping[str, Any], _folder: Path) -> Source:
    """Open a source of x: float32 [8, 8, 1] in [0, 1]; y: int64 [], 0 to 9.

    Raises:
        RunFileError: an option is set; the source has none.
    """
    parse_options(Options, options, source="digits")
    # The data never changes, so its name identifies its content, and a prepared dataset needs no scikit-learn.
    name = "scikit-learn digits"
    return Source(content=name, settings={}, origin={"package": name}, length=_EXAMPLES, read=_read)


def _read() -> Iterator[LocatedExample]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as fault:
        raise SourceError(
            f"data.source: digits: scikit-learn cannot be imported ({fault}); pip install scikit-learn"
        ) from fault
    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / _BRIGHTEST).astype(np.float32)
    for index, (image, label) in enumerate(zip(images, labels.astype(np.int64), strict=True)):
        yield f"digits, example {index}", (image, label)
