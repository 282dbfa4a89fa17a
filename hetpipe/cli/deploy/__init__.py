"""A cluster of containers: on this machine, or as files that others carry out."""
