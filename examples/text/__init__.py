"""A byte-level GPT on text that every Python carries."""
