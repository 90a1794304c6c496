"""Keras's configuration is the run's in every process, and what the run's code sets holds in every build."""

from collections.abc import Iterator
from pathlib import Path

import keras
import pytest

from baton.tasks.foundation import keras_config as module
from baton.tasks.foundation.contracts.log_entry import KerasConfig
from baton.tasks.foundation.errors import InvalidInput, ModelError
from baton.tasks.foundation.keras_config import keep_keras_config, keras_config, require_keras_file, set_keras_config
from baton.tasks.foundation.model import build
from baton.tasks.foundation.model.build import preserved_random_states
from tests.support.lab import built, lab_of, spec_of

OTHER = KerasConfig(epsilon=1e-3, floatx="float64", image_data_format="channels_first")
MODEL = """
def build():
    {within}
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model
"""


@pytest.fixture(autouse=True)
def process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process in which nothing was kept; Keras's configuration is put back after the test."""
    for name, fresh in (("_own", []), ("_kept", []), ("_of_imports", {}), ("_policies_of_imports", {})):
        monkeypatch.setattr(module, name, fresh)
    with preserved_random_states():
        keras.utils.clear_session(free_memory=False)
        yield


def test_recorded_config_is_set_once_and_the_own_one_again() -> None:
    own = keras_config()
    assert keep_keras_config(None) == own
    assert keep_keras_config(OTHER) == keras_config() == OTHER
    assert keras.config.dtype_policy().name == "float64"
    keras.config.set_epsilon(0.5)  # as the run's code does
    keep_keras_config(OTHER)
    assert keras.config.epsilon() == 0.5
    assert keep_keras_config(None) == keras_config() == own
    assert keras.config.dtype_policy().name == "float32"


def test_policy_of_the_user_stays_when_floatx_is_set() -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    set_keras_config(OTHER)
    assert keras.config.dtype_policy().name == "mixed_bfloat16"


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        (None, None),
        ('{"epsilon": 1e-07, "floatx": "float64", "image_data_format": "channels_first", "backend": "jax"}', None),
        ('{"image_dim_ordering": "tf", "backend": "theano"}', None),
        ('{"epsilon": 1e-07, "flo', None),  # Keras ignores what is no JSON
        ('{"epsilon": 0}', "epsilon = 0 is no number with a point or exponent"),
        ('{"floatx": "bfloat16"}', "floatx = bfloat16 is not one of float16, float32, float64"),
        ('{"image_data_format": "tf"}', "image_data_format = tf is not one of channels_first, channels_last"),
        ("[]", "is no JSON object"),
    ],
)
def test_keras_file_that_ends_the_import_is_refused(text: str | None, refused: str | None, tmp_path: Path) -> None:
    file = tmp_path / "keras.json"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    if refused is None:
        require_keras_file({"KERAS_HOME": str(tmp_path)})
        return
    with pytest.raises(InvalidInput) as fault:
        require_keras_file({"KERAS_HOME": str(tmp_path)})
    assert f"{file}" in str(fault.value)
    assert refused in str(fault.value)


def test_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.config, "backend", lambda: "torch")
    with pytest.raises(InvalidInput, match=r"torch in this process.*\nhint: set KERAS_BACKEND=tensorflow before"):
        keep_keras_config(None)


def test_floatx_set_by_the_build_function_is_refused(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, MODEL.format(within='keras.config.set_floatx("float64")'))
    with pytest.raises(ModelError) as refused:
        built(lab, spec_of("build"))
    assert (
        "model.py:build changes keras.config.floatx() from float32 to float64 "
        '(model.py, line 10: keras.config.set_floatx("float64"))'
    ) in str(refused.value)
    assert "hint: call keras.config.set_floatx('float64') at the top of model.py" in str(refused.value)
    assert keras.config.floatx() == "float32"


def test_what_the_module_sets_holds_in_its_builds_only(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    top = 'keras.config.set_floatx("float64")\nkeras.config.set_epsilon(0.25)\n'
    lab = lab_of(tmp_path / "one", top + MODEL.format(within="keras.config.set_image_data_format('channels_first')"))
    (tmp_path / "other").mkdir()
    other = lab_of(tmp_path / "other", MODEL.format(within="pass"))
    wanted = KerasConfig(epsilon=0.25, floatx="float64", image_data_format="channels_first")
    for _ in range(2):
        assert built(lab, spec_of("build")).model.layers[-1].kernel.dtype == "float64"
        assert keras_config() == wanted
        assert built(other, spec_of("build")).model.layers[-1].kernel.dtype == "float32"
        assert keras_config() == KerasConfig(epsilon=1e-7, floatx="float32", image_data_format="channels_last")
        # As code that yields examples may do in one process, and not in another.
        keras.config.set_epsilon(0.5)
        keras.config.set_dtype_policy("mixed_bfloat16")


@pytest.mark.parametrize("top", ["", 'keras.config.set_dtype_policy("mixed_float16")'])
def test_policy_from_before_the_first_import_does_not_count(
    top: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_imported", set())
    keras.config.set_dtype_policy("mixed_bfloat16")
    lab = lab_of(tmp_path, f"{top}\n{MODEL.format(within='pass')}")
    assert built(lab, spec_of("build")).model.layers[-1].compute_dtype == ("float16" if top else "float32")
