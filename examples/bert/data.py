"""Lines of Python's help topics (class 0) and of its source code (class 1), as bytes of different lengths."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

Sample = tuple[bytes, int]

MAX_BYTES = 64
MIN_BYTES = 16
SAMPLES_PER_CLASS = 2000
PADDING = 0
CLASSIFY = 1
"""Stands before the text, as BERT's [CLS]."""
BUCKET = 512
"""Samples that are sorted by their length."""
EVAL_EVERY = 10
"""Of this many lines of a class the last one is for evaluation."""


def train_data() -> list[Sample]:
    """Nine of ten lines, the classes in turn."""
    return [sample for pair in _pairs(for_evaluation=False) for sample in pair]


def eval_data() -> list[Sample]:
    """Every tenth line of each class."""
    return [sample for pair in _pairs(for_evaluation=True) for sample in pair]


def by_length(dataset: Sequence[Sample]) -> Iterator[int]:
    """The order of an epoch: random buckets, each sorted by length, so that minibatches have little padding."""
    shuffled = torch.randperm(len(dataset)).tolist()
    for start in range(0, len(shuffled), BUCKET):
        yield from sorted(shuffled[start : start + BUCKET], key=lambda index: len(dataset[index][0]))


def pad(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """Collate samples of different lengths.

    Returns:
        input_ids and attention_mask, int64 [samples, longest], labels int64 [samples].
    """
    longest = max(len(text) for text, _ in samples) + 1
    input_ids = torch.full((len(samples), longest), PADDING)
    for row, (text, _) in enumerate(samples):
        input_ids[row, : len(text) + 1] = torch.tensor([CLASSIFY, *text])
    labels = torch.tensor([label for _, label in samples])
    return {"input_ids": input_ids, "attention_mask": (input_ids != PADDING).long(), "labels": labels}


def _pairs(*, for_evaluation: bool) -> list[tuple[Sample, Sample]]:
    """One line of each class."""
    wrapped = [textwrap.wrap(re.sub(r"\s+", " ", topic), MAX_BYTES) for topic in topics.values()]
    folder = Path(json.__file__).parent.parent
    prose = _chosen([line for lines in wrapped for line in lines])
    source = _chosen([line.strip() for path in sorted(folder.glob("[a-d]*.py")) for line in _lines(path)])
    pairs = [((text, 0), (code, 1)) for text, code in zip(prose, source, strict=True)]
    return [pair for index, pair in enumerate(pairs) if (index % EVAL_EVERY == EVAL_EVERY - 1) == for_evaluation]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _chosen(lines: Sequence[str]) -> list[bytes]:
    """As many as there are samples of a class, from everywhere in `lines`."""
    encoded = [line.encode()[:MAX_BYTES] for line in lines]
    usable = [line for line in dict.fromkeys(encoded) if len(line) >= MIN_BYTES]
    return usable[:: len(usable) // SAMPLES_PER_CLASS][:SAMPLES_PER_CLASS]
