"""A parameter-server shard's process."""
