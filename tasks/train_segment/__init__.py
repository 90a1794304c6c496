"""Stage: committed checkpoint -> staged checkpoint, by training one segment."""
