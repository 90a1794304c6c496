"""The stage init-or-restore: starts a run, or restores its newest committed checkpoint."""
