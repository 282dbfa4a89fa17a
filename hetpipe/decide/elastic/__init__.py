"""Decisions about a changing cluster: incarnations of virtual workers, stragglers, repartitions, enlarging."""
