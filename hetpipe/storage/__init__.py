"""Persistent storage: the coordinator's store (one contract, in memory or in Redis), and a write-ahead log."""
