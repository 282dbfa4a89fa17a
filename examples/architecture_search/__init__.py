"""A search for an architecture among those of a supernet, whose candidates share their weights."""
