"""Read-only commands about a run."""
