"""Committed checkpoints: verify, commit, select, retire."""
