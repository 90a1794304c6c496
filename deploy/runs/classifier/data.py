"""Handwritten digits, 8 x 8 pixels, as scikit-learn carries them."""

from sklearn.datasets import load_digits


def load():
    x, y = digits()
    return x[:1600], y[:1600]


def load_validation():
    x, y = digits()
    return x[1600:], y[1600:]


def digits():
    images, labels = load_digits(return_X_y=True)
    return images.reshape(-1, 8, 8, 1).astype("float32") / 16, labels
