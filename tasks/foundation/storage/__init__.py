"""Files on file:// and memory://: create-only writes, checksums, no renames to rely on."""
