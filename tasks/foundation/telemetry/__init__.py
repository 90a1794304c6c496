"""The events of a run: one interface, one file per sink."""
