"""Requests to stop a running training: signals, notices of the machine's end, the time budget."""
