"""Exports a committed checkpoint as files that Keras or TensorFlow reads without Baton."""
