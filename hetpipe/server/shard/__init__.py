"""The parameter-server process of a shard."""
