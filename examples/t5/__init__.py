"""T5 of Hugging Face, sequence to sequence: words backwards."""
