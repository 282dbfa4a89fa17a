"""Models as users have them: nothing about them is written for hetpipe. Small, with random weights, and their data."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hetpipe.pipeline.torchvision_operators import prepare_import

prepare_import()  # before transformers, timm and torchvision

VOCABULARY = 60
TOKENS = 9
SAMPLES = 26
CLASSES = 5


class TokenDicts:
    """Sequences of several lengths, padded: mappings of the model's arguments."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, VOCABULARY, (TOKENS,), generator=generator)
        mask = torch.ones_like(ids)
        mask[TOKENS - index % 4 :] = 0
        return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Images:
    """Pairs of an image and its class."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 32, 32, generator=generator), index % CLASSES


def tokens() -> TokenDicts:
    return TokenDicts()


def images() -> Images:
    return Images()


def hugging_face(kind: str, model_type: str, **config: Any) -> nn.Module:
    transformers = importlib.import_module("transformers")

    made = transformers.AutoConfig.for_model(model_type, **config)
    model: nn.Module = getattr(transformers, kind).from_config(made)
    return model


def gpt2() -> nn.Module:
    """Tied weights, dropout, a mask, a cache, its own loss."""
    return hugging_face(
        "AutoModelForCausalLM", "gpt2", vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def t5() -> nn.Module:
    """Three uses of one weight, an encoder whose output every block of the decoder reads, a bias that blocks share."""
    return hugging_face(
        "AutoModelForSeq2SeqLM", "t5", vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip


def resnet18() -> nn.Module:
    """Skips, BatchNorm, ReLU in place."""
    model: nn.Module = importlib.import_module("torchvision").models.resnet18(num_classes=CLASSES)
    return model


class UNet(nn.Module):
    """Long skips, concatenation, functions between modules."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.block(3, width), self.block(width, 2 * width)])
        self.middle = self.block(2 * width, 2 * width)
        self.up = nn.ModuleList([self.block(4 * width, width), self.block(2 * width, width)])
        self.head = nn.Linear(width, CLASSES)

    @staticmethod
    def block(inner: int, outer: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer), nn.ReLU(inplace=True), nn.Dropout2d(0.1)
        )

    def forward(self, image: Tensor) -> Tensor:
        kept = []
        for block in self.down:
            image = block(image)
            kept.append(image)
            image = nn.functional.max_pool2d(image, 2)
        image = self.middle(image)
        for block in self.up:
            image = block(torch.cat([nn.functional.interpolate(image, scale_factor=2.0), kept.pop()], 1))
        result: Tensor = self.head(image.mean((2, 3)))
        return result


def u_net() -> nn.Module:
    return UNet()


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


def of_logits(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """A loss of one's own on the output of a Hugging Face model."""
    logits: Tensor = output.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Wide(nn.Module):
    """64 MiB of weights, with skips; a frozen part of 4 MiB is in the middle."""

    WIDTH = 1024

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(self.WIDTH, self.WIDTH, bias=False) for _ in range(16))
        self.blocks[8].requires_grad_(requires_grad=False)
        self.head = nn.Linear(self.WIDTH, 4)

    def forward(self, values: Tensor) -> Any:
        for block in self.blocks:
            values = values + torch.tanh(block(values))
        return self.head(values)


def wide() -> nn.Module:
    return Wide()


class WideAndComputed(Wide):
    """Its constructor looks into its weights, so it cannot be built without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = float(self.head.weight.detach().abs().max())


def wide_and_computed() -> nn.Module:
    return WideAndComputed()


def vectors() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(8, Wide.WIDTH, generator=generator), torch.arange(8) % 4)
