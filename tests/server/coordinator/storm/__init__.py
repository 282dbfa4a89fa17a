"""Whole coordinators under random faults: real decision logs, and small models of agents, stages and shards."""
