"""A Llama whose weights are frozen, with peft's low-rank adapters on its linear layers."""

from __future__ import annotations

from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=0,
    eos_token_id=0,
)


def build() -> nn.Module:
    """The model of the job file. With a checkpoint at hand: `from_pretrained` in place of `from_config`."""
    base = AutoModelForCausalLM.from_config(CONFIG)
    # Without a checkpoint the base knows nothing, so its head learns whole; the rest learns through adapters.
    adapters = LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", modules_to_save=["lm_head"])
    found: nn.Module = get_peft_model(base, adapters)
    return found
