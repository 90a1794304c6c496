"""The commit log of a run: the only truth about what is committed."""
