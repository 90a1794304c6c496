"""The train state as a named tree: write, read, signature, digest."""
