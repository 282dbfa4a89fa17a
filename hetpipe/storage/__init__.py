"""The coordinator's store: one contract, in memory or in Redis."""
