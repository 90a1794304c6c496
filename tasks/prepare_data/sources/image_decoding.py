"""Decodes one image file, and describes files that cannot be decoded."""

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


def decode_image_file(data: bytes, shape: Sequence[int], dtype: str) -> Array:
    """Decode a JPEG or PNG file, as `dataset.images.decode_image` does.

    Args:
        data: the content of the file.
        shape: (height, width, channels).
        dtype: uint8 or float32.

    Raises:
        ValueError: the file is damaged or of another kind; says which.
    """
    import tensorflow as tf

    from tasks.foundation.dataset.images import decode_image

    if problem := _not_an_image(data):
        raise ValueError(problem)
    try:
        image: Array = decode_image(tf.constant(data), shape, dtype).numpy()
    except tf.errors.InvalidArgumentError as fault:
        raise ValueError(f"is a {'PNG' if data.startswith(_PNG) else 'JPEG'} that is truncated or damaged") from fault
    return image


def _not_an_image(data: bytes) -> str | None:
    """Detect other kinds by content, because a file's name may be wrong; None for JPEG and PNG."""
    if data.startswith(_PNG):
        # The chunk that marks an animated PNG comes before the pixels.
        return "is an animated PNG" if b"acTL" in data[: max(0, data.find(b"IDAT"))] else None
    if data.startswith(_JPEG):
        return None
    if not data:
        return "is empty"
    if data[8:12] == b"WEBP":
        return "is WebP"
    kind = next((kind for begin, kind in _OTHERS.items() if data.startswith(begin)), None)
    return f"is {kind}" if kind else "is not an image"
