"""Names of exports, checked before any work."""

from pathlib import Path

import pytest

from tasks.evaluate.export_target import require_free_target
from tasks.foundation.errors import InvalidInput


@pytest.mark.parametrize(
    ("form", "name", "better"),
    [
        ("weights", "w.h5", "w.weights.h5"),
        ("weights", "w.hdf5", "w.weights.h5"),
        ("weights", "w.weights", "w.weights.h5"),
        ("weights", "w.keras", "w.weights.h5"),
        ("weights", "w", "w.weights.h5"),
        ("weights", "w.v2", "w.v2.weights.h5"),
        ("weights", ".h5", ".h5.weights.h5"),
        ("keras", "w.weights.h5", "w.keras"),
        ("keras", "w.h5", "w.keras"),
        ("keras", "w.KERAS", "w.KERAS.keras"),
    ],
)
def test_suggested_name_is_accepted(form: str, name: str, better: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        require_free_target(form, tmp_path / name)
    assert str(caught.value).endswith(f"; use {tmp_path / better}")
    require_free_target(form, tmp_path / better)
