"""Decisions about a cluster that changes: incarnations of virtual workers, stragglers, repartitions, enlarging."""
