"""Everything that asks a running training to stop, led to one place."""
