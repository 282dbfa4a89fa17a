"""`hetpipe workers`: the virtual workers of a run."""
