"""Prepared datasets: the shard format, the manifest and the data order."""
