"""Stage: nothing, or the tip of the log -> the committed checkpoint to start from."""
