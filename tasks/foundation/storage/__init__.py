"""Files on file://, gs:// and memory://: create-only writes, checksums, no renames to rely on."""
