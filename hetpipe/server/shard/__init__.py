"""The process of a parameter-server shard."""
