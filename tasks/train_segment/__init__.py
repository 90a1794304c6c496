"""The stage train-segment: trains one segment."""
