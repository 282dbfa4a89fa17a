"""Text as bytes, cut into samples of `CONTEXT` bytes; each is to be continued by one byte at every position.

The text is `examples/text/input.txt` where you have put one, else Python's own help topics: a few hundred kilobytes of
English and code in the standard library, so nothing needs to be downloaded. To train on another file, put it there or
change `INPUT_FILE`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from examples.text.model import CONTEXT

INPUT_FILE = Path(__file__).parent / "input.txt"

EVAL_SHARE = 0.05
"""The end of the text, by bytes, is for evaluation."""


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is a pair of int64 tensors [CONTEXT]: bytes from i·CONTEXT on, and the same shifted by one."""

    def __init__(self, text: bytes) -> None:
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return max(0, len(self._bytes) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * CONTEXT
        window = self._bytes[start : start + CONTEXT + 1].long()
        return window[:-1], window[1:]


def train_data() -> Text:
    """The first 95 % of the text."""
    text = read_text()
    return Text(text[: _cut(text)])


def eval_data() -> Text:
    """The rest."""
    text = read_text()
    return Text(text[_cut(text) :])


def read_text() -> bytes:
    """The whole text.

    Raises:
        ValueError: it is too short for one sample in each part.
    """
    text = INPUT_FILE.read_bytes() if INPUT_FILE.exists() else _help_topics()
    num_eval_bytes = len(text) - _cut(text)
    if num_eval_bytes <= CONTEXT:
        raise ValueError(
            f"the text has {len(text)} bytes, of which {num_eval_bytes} are for evaluation; give it at least "
            f"{round((CONTEXT + 2) / EVAL_SHARE)}"
        )
    return text


def _cut(text: bytes) -> int:
    return int(len(text) * (1 - EVAL_SHARE))


def _help_topics() -> bytes:
    # A large module that is not needed where the text is the user's.
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()
