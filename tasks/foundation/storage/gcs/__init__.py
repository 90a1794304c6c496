"""gs://: Cloud Storage through gcsfs; create-only writes, checksums on both ways, retries with an end."""
