"""Checkpoints: snapshot, write, verify, restore, commit, retain, fork. `save.py` is where a save begins."""
