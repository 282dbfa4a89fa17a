"""The agent's program."""
