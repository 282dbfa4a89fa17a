"""A vision transformer that is fine-tuned, while its first layers freeze."""
