"""Families of models as users have them, unmodified: small random configurations with their own dropout and ties.

Those of Hugging Face are named as a job names them, by a call with arguments. Their data are padded mappings.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.model import zoo

SGD: dict[str, Any] = {"name": "SGD", "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
ADAMW: dict[str, Any] = {"name": "AdamW", "lr": 0.003}


@dataclass(frozen=True, slots=True)
class Family:
    """One of them, as a job names it."""

    model: str | dict[str, Any]
    """The job's `model`."""
    data: str
    """A function of this module: the job's `data.train`."""
    loss: str | None = None
    """A function of `zoo`; None: the model has its own."""
    optimizer: Mapping[str, Any] = field(default_factory=lambda: dict(ADAMW))

    @property
    def train(self) -> Any:
        """The data set."""
        return globals()[self.data]()

    @property
    def loss_function(self) -> Callable[[Any, Any], Tensor] | None:
        """The loss."""
        return None if self.loss is None else getattr(zoo, self.loss)


def of(model_type: str, kind: str = "AutoModelForCausalLM", data: str = "tokens", **config: Any) -> Family:
    """A model of transformers with a configuration of its own, which computes its own loss."""
    configuration = {"call": "transformers:AutoConfig.for_model", "args": {"model_type": model_type, **config}}
    return Family({"call": f"transformers:{kind}.from_config", "args": {"config": configuration}}, data)


def here(name: str, data: str = "images", loss: str | None = "cross_entropy", **changes: Any) -> Family:
    """A model that a function of this module builds."""
    return Family(f"{__name__}:{name}", data, loss, **changes)


# -- data ----------------------------------------------------------------------------------------------------------

tokens, images = zoo.tokens, zoo.images


class Samples:
    """Drawn under their index."""

    def __init__(self, draw: Callable[[int, torch.Generator], Any]) -> None:
        self._draw = draw

    def __len__(self) -> int:
        return zoo.SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self._draw(index, torch.Generator().manual_seed(index))


def classified() -> Samples:
    """Padded sequences with a class each."""
    padded = zoo.tokens()
    return Samples(lambda index, _: {**padded[index], "labels": index % 2})


def pictures() -> Samples:
    """Images as mappings."""
    return Samples(lambda index, own: {"pixel_values": torch.randn(3, 32, 32, generator=own), "labels": index % 2})


def _spoken(index: int, own: torch.Generator) -> dict[str, Tensor]:
    labels = torch.randint(3, zoo.VOCABULARY, (7,), generator=own)
    labels[7 - index % 3 :] = -100
    return {"input_features": torch.randn(8, 40, generator=own), "labels": labels}


def speech() -> Samples:
    """Spectra, and texts of several lengths."""
    return Samples(_spoken)


def _translated(index: int, own: torch.Generator) -> tuple[tuple[Tensor, Tensor], Tensor]:
    source, target = (torch.randint(1, zoo.VOCABULARY, (7,), generator=own) for _ in range(2))
    source[7 - index % 3 :] = 0
    return (source, target), target.roll(-1)


def translations() -> Samples:
    """Pairs of a padded source and a target, and what follows the target."""
    return Samples(_translated)


# -- models --------------------------------------------------------------------------------------------------------


class TiedTransformer(nn.Module):
    """`nn.Transformer` between one weight's three uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(zoo.VOCABULARY, 16)
        self.transformer = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)
        self.head = nn.Linear(16, zoo.VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        padding = torch.zeros(source.shape).masked_fill(source == 0, float("-inf"))
        hidden = self.transformer(
            self.embedding(source),
            self.embedding(target),
            tgt_mask=mask,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        result: Tensor = self.head(hidden)
        return result


u_net, resnet18, gpt2, t5 = zoo.u_net, zoo.resnet18, zoo.gpt2, zoo.t5


def mobilenet_v3() -> nn.Module:
    """Squeeze and excitation, depthwise convolutions."""
    model: nn.Module = importlib.import_module("torchvision").models.mobilenet_v3_small(num_classes=zoo.CLASSES)
    return model


def densenet121() -> nn.Module:
    """Every layer of a block reads all before it."""
    model: nn.Module = importlib.import_module("torchvision").models.densenet121(num_classes=zoo.CLASSES, drop_rate=0.1)
    return model


def timm_vit() -> nn.Module:
    """Stochastic depth."""
    found: nn.Module = importlib.import_module("timm").create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=3, num_heads=2,
        num_classes=zoo.CLASSES, drop_path_rate=0.2,
    )  # fmt: skip
    return found


def lora() -> nn.Module:
    """Frozen weights and adapters with a dropout of their own."""
    model = zoo.gpt2()
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(
        r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    found: nn.Module = peft.get_peft_model(model, config)
    return found


# -- the families --------------------------------------------------------------------------------------------------

_SMALL: dict[str, Any] = {
    "vocab_size": zoo.VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 32,
}  # fmt: skip
_GROUPED: dict[str, Any] = {**_SMALL, "num_key_value_heads": 1, "attention_dropout": 0.1}

FAMILIES: dict[str, Family] = {
    "GPT-2": of(
        "gpt2", vocab_size=zoo.VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0,
        eos_token_id=0,
    ),
    "Llama": of("llama", **_GROUPED, pad_token_id=0),
    "Qwen2": of("qwen2", **_GROUPED),
    "Mistral": of("mistral", **_GROUPED, sliding_window=8),
    "Gemma 3": of("gemma3_text", **_GROUPED, head_dim=8, sliding_window=8, pad_token_id=0),
    "Mixtral": of("mixtral", **_GROUPED, num_local_experts=4),
    "OPT": of(
        "opt", vocab_size=zoo.VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32,
        max_position_embeddings=32, word_embed_proj_dim=16,
    ),
    "BERT MLM": of("bert", "AutoModelForMaskedLM", **_SMALL),
    "RoBERTa classification": of(
        "roberta", "AutoModelForSequenceClassification", "classified", **_SMALL, num_labels=2
    ),
    "DistilBERT": of(
        "distilbert", "AutoModelForMaskedLM", vocab_size=zoo.VOCABULARY, dim=16, n_layers=2, n_heads=2, hidden_dim=32,
        max_position_embeddings=32,
    ),
    "T5": of(
        "t5", "AutoModelForSeq2SeqLM", vocab_size=zoo.VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2,
        num_heads=2, decoder_start_token_id=0,
    ),
    "ViT": of(
        "vit", "AutoModelForImageClassification", "pictures", hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8, hidden_dropout_prob=0.1,
    ),
    "Whisper": of(
        "whisper", "AutoModelForSpeechSeq2Seq", "speech", vocab_size=zoo.VOCABULARY, d_model=16, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        num_mel_bins=8, max_source_positions=20, max_target_positions=32, dropout=0.1, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    ),
    "ResNet-18": here("resnet18", optimizer=SGD),
    "MobileNetV3": here("mobilenet_v3", optimizer=SGD),
    "DenseNet-121": here("densenet121", optimizer=SGD),
    "U-Net": here("u_net", optimizer=SGD),
    "timm ViT": here("timm_vit"),
    "nn.Transformer": here("TiedTransformer", "translations", "of_tokens"),
    "LoRA GPT-2": here("lora", "tokens", None),
}  # fmt: skip
