"""GPT-2 of Hugging Face from scratch, on text that every Python carries."""
