"""What a command prints about a run: its state at the end, and its time by cause."""
