"""Families of models, unmodified, with small random configurations: watched and cut, they have the bare bits."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.model import zoo
from tests.model.harness import Made, Subject, assert_cut_anywhere, differences
from tests.model.without_operators import import_torchvision

_SMALL: dict[str, Any] = {
    "vocab_size": zoo.VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 32,
}  # fmt: skip
_CAUSAL = "AutoModelForCausalLM"


def _tokens() -> Made:
    rows = [zoo.tokens()[index] for index in range(3)]
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def _classified() -> Made:
    made = dict(_tokens())  # type: ignore[arg-type]  # a mapping
    return {**made, "labels": torch.tensor([0, 1, 1])}


def _pictures() -> Made:
    generator = torch.Generator().manual_seed(0)
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator), "labels": torch.tensor([0, 1])}


def _speech() -> Made:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(3, zoo.VOCABULARY, (2, 7), generator=generator)
    return {"input_features": torch.randn(2, 8, 40, generator=generator), "labels": labels}


def _images() -> Made:
    return (torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)),)


def _pairs() -> Made:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(0, zoo.VOCABULARY, (2, 7), generator=generator) for _ in range(2))


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
        hidden = self.transformer(self.embedding(source), self.embedding(target), tgt_mask=mask, tgt_is_causal=True)
        result: Tensor = self.head(hidden)
        return result


def _lora() -> nn.Module:
    model = zoo.gpt2()
    peft = importlib.import_module("peft")
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn"], task_type="CAUSAL_LM")
    found: nn.Module = peft.get_peft_model(model, config)
    return found


def _vision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model: nn.Module = getattr(import_torchvision().models, name)(num_classes=zoo.CLASSES, **options)
        return model

    return build


def _timm() -> nn.Module:
    import_torchvision()
    found: nn.Module = importlib.import_module("timm").create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=16, depth=3, num_heads=2, num_classes=5,
        drop_path_rate=0.2,
    )  # fmt: skip
    return found


def _hf(model_type: str, kind: str = _CAUSAL, **config: Any) -> Callable[[], nn.Module]:
    return lambda: zoo.hugging_face(kind, model_type, **config)


#: Family → how it is built, what it is called with, and whether its loss is its own.
FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Made]]] = {
    "gpt2": (zoo.gpt2, _tokens),
    "llama": (_hf("llama", **_SMALL, num_key_value_heads=1, pad_token_id=0), _tokens),
    "qwen2": (_hf("qwen2", **_SMALL, num_key_value_heads=1), _tokens),
    "mistral": (_hf("mistral", **_SMALL, num_key_value_heads=1, sliding_window=8), _tokens),
    "gemma3": (
        _hf("gemma3_text", **_SMALL, num_key_value_heads=1, head_dim=8, sliding_window=8, pad_token_id=0),
        _tokens,
    ),
    "mixtral": (_hf("mixtral", **_SMALL, num_key_value_heads=1, num_local_experts=4), _tokens),
    "opt": (
        _hf("opt", vocab_size=zoo.VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32,
            max_position_embeddings=32, word_embed_proj_dim=16),
        _tokens,
    ),
    "bert": (_hf("bert", "AutoModelForMaskedLM", **_SMALL), _tokens),
    "roberta": (_hf("roberta", "AutoModelForSequenceClassification", **_SMALL, num_labels=2), _classified),
    "distilbert": (
        _hf("distilbert", "AutoModelForMaskedLM", vocab_size=zoo.VOCABULARY, dim=16, n_layers=2, n_heads=2,
            hidden_dim=32, max_position_embeddings=32),
        _tokens,
    ),
    "t5": (zoo.t5, _tokens),
    "vit": (
        _hf("vit", "AutoModelForImageClassification", hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, image_size=32, patch_size=8),
        _pictures,
    ),
    "whisper": (
        _hf("whisper", "AutoModelForSpeechSeq2Seq", vocab_size=zoo.VOCABULARY, d_model=16, encoder_layers=2,
            decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
            decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=20, max_target_positions=32, dropout=0.1,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
            begin_suppress_tokens=None),
        _speech,
    ),
    "resnet18": (zoo.resnet18, _images),
    "mobilenet_v3": (_vision("mobilenet_v3_small"), _images),
    "densenet121": (_vision("densenet121", drop_rate=0.1), _images),
    "u_net": (zoo.u_net, _images),
    "timm_vit": (_timm, _images),
    "transformer": (TiedTransformer, _pairs),
    "lora": (_lora, _tokens),
}  # fmt: skip

#: Where several tries at the cuts of all families take minutes, `make test` has those of `test_cutting`.
PLACES = 6


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_the_bare_models_bits_wherever_it_is_cut(name: str) -> None:
    for package in ("transformers", "timm", "peft", "PIL"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    build, make = FAMILIES[name]
    made = make()
    subject = Subject(build, made, loss=None if isinstance(made, dict) else lambda output: output.square().mean())
    assert not differences(subject.uncut(made), subject.watched(made))
    assert assert_cut_anywhere(subject, made, at_most=PLACES) >= 2 * PLACES
