"""The user's Keras model: building it, checking it, and finding its variables."""
