"""What a run says while it runs: one interface, one sink a file."""
