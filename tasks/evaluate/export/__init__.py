"""A committed checkpoint as a file that Keras or TensorFlow alone can read."""
