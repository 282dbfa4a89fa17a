"""Python's help topics as bytes, in samples of `CONTEXT` bytes: mappings of the model's arguments."""

from __future__ import annotations

from torch import Tensor

from examples.text.data import Text
from examples.text.data import eval_data as eval_text
from examples.text.data import train_data as train_text


class CausalText:
    """Sample i is {input_ids, labels}, int64 [CONTEXT], both the same: the model shifts the labels itself."""

    def __init__(self, text: Text) -> None:
        self._text = text

    def __len__(self) -> int:
        return len(self._text)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids, _ = self._text[index]
        return {"input_ids": ids, "labels": ids}


def train_data() -> CausalText:
    """The first 95 % of the text."""
    return CausalText(train_text())


def eval_data() -> CausalText:
    """The rest."""
    return CausalText(eval_text())
