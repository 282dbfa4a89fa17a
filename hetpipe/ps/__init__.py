"""Parameter-server shards: tensors, the clock shard, and the stage's client."""
