"""The shard format and the data order."""
