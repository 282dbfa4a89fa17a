"""Words of Python's help topics, and the same backwards, as bytes of different lengths."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pydoc_data.topics import topics

import torch
from torch import Tensor

MIN_LETTERS, MAX_LETTERS = 3, 12
PADDING, END = 0, 1
IGNORED = -100
EVAL_EVERY = 10
"""Of this many words the last one is for evaluation."""


def train_data() -> list[str]:
    """Nine of ten words."""
    return [word for index, word in enumerate(_words()) if index % EVAL_EVERY != EVAL_EVERY - 1]


def eval_data() -> list[str]:
    """Every tenth word."""
    return _words()[EVAL_EVERY - 1 :: EVAL_EVERY]


def backwards(words: Sequence[str]) -> dict[str, Tensor]:
    """Collate words: each is to be translated into itself, backwards.

    Returns:
        input_ids, attention_mask and labels, int64 [words, longest + 1]; padding of labels is `IGNORED`.
    """
    shape = (len(words), max(map(len, words)) + 1)
    input_ids, labels = torch.full(shape, PADDING), torch.full(shape, IGNORED)
    for row, word in enumerate(words):
        input_ids[row, : len(word) + 1] = torch.tensor([*word.encode(), END])
        labels[row, : len(word) + 1] = torch.tensor([*word[::-1].encode(), END])
    return {"input_ids": input_ids, "attention_mask": (input_ids != PADDING).long(), "labels": labels}


def _words() -> list[str]:
    """All words of lower-case letters, in the order in which they first occur."""
    found = re.findall(rf"\b[a-z]{{{MIN_LETTERS},{MAX_LETTERS}}}\b", " ".join(topics.values()))
    return list(dict.fromkeys(found))
