"""Commands that answer a question by many runs."""
