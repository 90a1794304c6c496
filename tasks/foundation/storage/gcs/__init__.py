"""gs://: Cloud Storage through gcsfs, with create-only writes, checksums both ways and bounded retries."""
