"""Image files as arrays, one at a time, with words for what is wrong with them."""

from collections.abc import Sequence

from tasks.foundation.dataset.features import Array

_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"
_OTHERS = {
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"<svg": "SVG",
    b"<?xml": "SVG or another XML file",
    b"%PDF": "PDF",
}


def decoded(data: bytes, shape: Sequence[int], dtype: str) -> Array:
    """A JPEG or PNG file as `dataset.images.decode_image` has it.

    Args:
        data: the whole file.
        shape: (height, width, channels).
        dtype: uint8 or float32.

    Raises:
        ValueError: it is another kind of file, or damaged; says which.
    """
    import tensorflow as tf

    from tasks.foundation.dataset.images import decode_image

    if told := _not_an_image(data):
        raise ValueError(told)
    try:
        image: Array = decode_image(tf.constant(data), shape, dtype).numpy()
    except tf.errors.InvalidArgumentError as fault:
        raise ValueError(f"is {'PNG' if data.startswith(_PNG) else 'JPEG'}, and cut off or damaged") from fault
    return image


def _not_an_image(data: bytes) -> str | None:
    """By content: what a file is named does not say what is in it."""
    if data.startswith(_PNG):
        # The chunk that makes a PNG an animation comes before the first pixels.
        return "is an animated PNG" if b"acTL" in data[: max(0, data.find(b"IDAT"))] else None
    if data.startswith(_JPEG):
        return None
    if not data:
        return "is empty"
    if data[8:12] == b"WEBP":
        return "is WebP"
    kind = next((kind for begin, kind in _OTHERS.items() if data.startswith(begin)), None)
    return f"is {kind}" if kind else "is no image"
