"""Allocation: the devices of each virtual worker. `policy.py` defines the interface; the other files implement it."""
