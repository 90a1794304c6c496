"""The stage prepare-data: reads a source, and writes shards and a dataset manifest."""
