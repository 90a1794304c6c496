"""What a process sees of its processor and of the variables by which libraries choose kernels."""

import os
from pathlib import Path

import pytest

from baton.tasks.foundation.machine import environment
from baton.tasks.foundation.machine.environment import backend_note, deciding_variables, processor, quiet_tensorflow

INTEL = """processor\t: 0
cpu family\t: 6
model\t\t: 85
model name\t: Intel(R) Xeon(R) CPU @ 2.00GHz
stepping\t: 3
flags\t\t: fpu sse4_2 sse4_1 avx avx2 fma amx_tile avx512f rdrand

processor\t: 1
model name\t: another
"""
ARM = """processor\t: 0
Features\t: fp asimd crc32 sve i8mm bf16
CPU implementer\t: 0x41
CPU variant\t: 0x1
CPU part\t: 0xd40
"""


@pytest.mark.parametrize(
    ("text", "name", "features"),
    [
        (
            INTEL,
            "Intel(R) Xeon(R) CPU @ 2.00GHz (family 6, model 85, stepping 3)",
            "amx_tile avx avx2 avx512f fma sse4_1 sse4_2",
        ),
        (ARM, "(implementer 0x41, part 0xd40, variant 0x1)", "asimd bf16 i8mm sve"),
        ("", None, None),
        (None, None, None),
    ],
)
def test_processor_is_described(text: str | None, name: str | None, features: str | None, tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    assert processor(file) == (name, features)


@pytest.mark.parametrize(
    ("variables", "decide"),
    [
        ({"TF_ENABLE_ONEDNN_OPTS": "0", "PATH": "/bin", "TF_CPP_MIN_LOG_LEVEL": "3"}, {"TF_ENABLE_ONEDNN_OPTS": "0"}),
        ({"DNNL_MAX_CPU_ISA": "AVX", "ONEDNN_VERBOSE": "1"}, {"DNNL_MAX_CPU_ISA": "AVX"}),
        (
            {"XLA_FLAGS": "--xla_dump_to=/home/me/x --xla_cpu_enable_fast_math=true"},
            {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"},
        ),
        ({"TF_XLA_FLAGS": "--tf_xla_persistent_cache_directory=/home/me/.cache/baton/xla"}, {}),
        ({"TF_XLA_FLAGS": "--tf_xla_auto_jit=2"}, {"TF_XLA_FLAGS": "--tf_xla_auto_jit=2"}),
        ({"ONEDNN_MAX_CPU_ISA": " "}, {}),
    ],
)
def test_only_variables_that_decide_are_recorded(variables: dict[str, str], decide: dict[str, str]) -> None:
    assert deciding_variables(variables) == decide


def test_long_values_are_cut_and_still_differ() -> None:
    one, other = (deciding_variables({"XLA_FLAGS": f"--{'x' * 100_000}{end}"})["XLA_FLAGS"] for end in "ab")
    assert one != other
    assert len(one) < 500


@pytest.mark.parametrize(("chosen", "is_said"), [(None, False), ("", False), ("tensorflow", False), ("jax", True)])
def test_another_backend_is_replaced_and_said(
    chosen: str | None, is_said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "_other_backend", [])
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    if chosen is not None:
        monkeypatch.setenv("KERAS_BACKEND", chosen)
    quiet_tensorflow()
    assert os.environ["KERAS_BACKEND"] == "tensorflow"
    assert ("KERAS_BACKEND = jax is ignored" in backend_note()) == is_said
