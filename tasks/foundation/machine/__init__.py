"""The machine that a process runs on: its devices, strategy and hosts, and what stops or watches the process."""
