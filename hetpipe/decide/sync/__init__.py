"""Synchronization decisions: when a minibatch may start, push and pull, and in which order events take effect. Pure."""
