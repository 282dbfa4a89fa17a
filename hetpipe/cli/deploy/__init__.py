"""A cluster of containers: on this machine, or as files for other tools."""
