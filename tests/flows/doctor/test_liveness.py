"""The peak memory of a compiled step."""

import keras
import pytest

from flows.doctor.liveness import peak_bytes, size_of
from flows.doctor.xla_program import compiled_step
from tests.support.step_models import batch_of, step_of


@pytest.fixture(autouse=True)
def _float32_policy() -> None:
    """Earlier tests may have left another dtype policy."""
    keras.config.set_dtype_policy("float32")


HLO = """\
HloModule step, is_scheduled=true, input_output_alias={ {1}: (1, {}, may-alias) }, entry_computation_layout={(f32[4])}

%body (p.1: (f32[100])) -> (f32[100]) {
  %p.1 = (f32[100]{0}) parameter(0)
  %g.1 = f32[100]{0} get-tuple-element(%p.1), index=0
  %big.1 = f32[500]{0} broadcast(%g.1), dimensions={0}
  %small.1 = f32[100]{0} slice(%big.1), slice={[0:100]}
  ROOT %t.1 = (f32[100]{0}) tuple(%small.1)
}

ENTRY %main (x: f32[4], w: f32[1000]) -> (f32[], f32[1000]) {
  %x = f32[4]{0} parameter(0)
  %w = f32[1000]{0} parameter(1)
  %first = f32[100]{0} fusion(%x), kind=kLoop, calls=%other
  %second = bf16[200]{0} fusion(%first), kind=kLoop, calls=%other
  %view = bf16[2,100]{1,0} bitcast(%second)
  %init = (f32[100]{0}) tuple(%first)
  %loop = (f32[100]{0}) while(%init), condition=%cond, body=%body
  %last = f32[100]{0} get-tuple-element(%loop), index=0
  %loss = f32[] fusion(%last, %view), kind=kLoop, calls=%other
  %updated = f32[1000]{0} fusion(%w, %loss), kind=kLoop, calls=%other
  ROOT %result = (f32[], f32[1000]{0}) tuple(%loss, %updated)
}
"""


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[16,8]{1,0}", 512),
        ("pred[]", 1),
        ("(bf16[3], s64[2,2]{1,0})", 38),
        ("f32[<=10,2]", 80),
        ("c64[2]", 16),
        ("token[]", 0),
        ("s4[8]", 4),
        ("f8e4m3fn[8]", 8),
    ],
)
def test_size_of_hlo_shape(shape: str, size: int) -> None:
    assert size_of(shape) == size


def test_peak_matches_manual_calculation() -> None:
    # In the loop, first (400), second (400, read later through a view) and big (2000) are live. The loop's result,
    # small, reuses the memory of first.
    assert peak_bytes(HLO) == 400 + 400 + 2000
    # With a tiny loop body the peak is at the end; the updated variable reuses the argument's memory.
    assert peak_bytes(HLO.replace("f32[500]", "f32[1]")) == 400 + 400 + 4
    # Without the alias the updated variable needs its own memory.
    assert peak_bytes(HLO.replace(", input_output_alias={ {1}: (1, {}, may-alias) }", "")) == 4000 + 4


def test_text_without_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY"):
        peak_bytes("HloModule nothing\n")


def test_dense_activations_within_factor_of_two() -> None:
    rows, width, depth = 512, 256, 6
    x = keras.Input((width,))
    hidden = x
    for _ in range(depth):
        hidden = keras.layers.Dense(width, activation="tanh")(hidden)
    model = keras.Model(x, keras.layers.Dense(1)(hidden))
    model.compile("sgd", "mse")
    step, specs, layers = step_of(model, batch_of((rows, width), (rows, 1)))
    peak = peak_bytes(compiled_step(step, specs, reference="model.py:build", layers=layers))
    # The backward pass needs the output of every layer.
    activations = depth * rows * width * 4
    assert activations / 2 < peak < activations * 2
