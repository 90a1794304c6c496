"""The share of a TPU's work that is padding."""

import pytest

from tasks.foundation.accelerator.tpu_padding import padding, padding_words


@pytest.mark.parametrize(
    ("batch", "share", "on_lanes"), [(8, 0, 0.9375), (6, 0.25, 0.953125), (128, 0, 0), (1, 0.875, 0.9921875)]
)
def test_batch_is_padded_to_the_tile(batch: int, share: float, on_lanes: float) -> None:
    found = padding(batch, {})
    assert (found.batch, found.batch_on_lanes, found.weights) == (share, on_lanes, 0)


@pytest.mark.parametrize(
    ("shape", "share"),
    [
        ((128, 256), 0),
        ((256, 8), 0),  # transposed, it fills its tiles
        ((3, 3, 128, 64), 0),
        ((100, 10), 1 - 1000 / (16 * 128)),
        ((3, 3, 1, 16), 1 - 16 / (8 * 128)),
    ],
)
def test_kernel_is_padded_to_the_tile(shape: tuple[int, ...], share: float) -> None:
    found = padding(8, {"kernel": shape, "bias": (10,), "scale": ()})
    assert found.layers == {"kernel": pytest.approx(share)}
    assert found.weights == pytest.approx(share)


def test_large_kernels_outweigh_small_ones() -> None:
    found = padding(8, {"large": (1024, 1024), "logits": (1024, 10)})
    assert found.layers["logits"] == pytest.approx(0.375)
    assert found.weights < 0.01
    assert padding_words(found, kind="tpu") == ""


def test_advice_has_figures_and_a_remedy() -> None:
    found = padding(6, {"conv/kernel": (3, 3, 1, 16), "logits/kernel": (64, 10)})
    words = padding_words(found, kind="tpu")
    for part in ("tiles of 8 x 128", "6 examples per replica are padded to 8", "25% of the work", "use 8 per replica "):
        assert part in words
    assert "conv/kernel 98%, logits/kernel 69%" in words
    assert "use 16 or 24 per replica " in padding_words(padding(17, {}), kind="tpu")


@pytest.mark.parametrize("kind", ["cpu", "gpu", "multi_worker"])
def test_only_a_tpu_pads(kind: str) -> None:
    assert padding_words(padding(1, {"kernel": (1, 1)}), kind=kind) == ""
