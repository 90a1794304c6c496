"""A run as one page: its curves, its times, its checkpoints."""
