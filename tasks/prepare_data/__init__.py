"""Stage: source -> TFRecord shards and a dataset manifest."""
