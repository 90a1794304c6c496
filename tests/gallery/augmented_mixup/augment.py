"""Random crops of each image, and mixtures of two images of a batch."""

import tensorflow as tf


def prepare(example):
    image, label = example
    return tf.cast(image, tf.float32) / 255.0, tf.one_hot(label, 3)


def augment(example, *, seed):
    image, label = prepare(example)
    seeds = tf.random.experimental.stateless_split(seed, 2)
    image = tf.image.resize_with_crop_or_pad(image, 12, 12)
    image = tf.image.stateless_random_crop(image, (10, 10, 3), seed=seeds[0])
    return tf.image.stateless_random_brightness(image, 0.1, seed=seeds[1]), label


def mixup(batch, *, seed):
    images, labels = batch
    share = tf.random.stateless_uniform((tf.shape(images)[0],), seed=seed)
    of_image, of_label = share[:, None, None, None], share[:, None]
    mixed = of_image * images + (1 - of_image) * tf.reverse(images, [0])
    return mixed, of_label * labels + (1 - of_label) * tf.reverse(labels, [0])
