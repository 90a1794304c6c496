"""Executes committed training again, and compares the state digests with the log."""
