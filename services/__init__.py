"""The programs of a cluster, started with `python -m services.NAME`: thin shells around the packages."""
