"""The stage checkpoint-to-GCS: commits a staged checkpoint."""
