"""LoRA of peft on a small Llama of Hugging Face."""
