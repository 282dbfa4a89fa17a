"""The coordinator's program."""
