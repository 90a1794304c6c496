"""The `baton` command, one file a verb."""
