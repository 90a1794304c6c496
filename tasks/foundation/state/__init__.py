"""The train state as a named tree: leaves, signature, digest, what differs between replicas, host state."""
