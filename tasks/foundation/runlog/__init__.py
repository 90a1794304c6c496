"""The commit log of a run: the only record of what is committed."""
