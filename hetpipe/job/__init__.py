"""The job file: its model, its rules, and every mistake in it at once."""
