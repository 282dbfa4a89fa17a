"""The handwritten digits that `hetpipe demo` and the examples train on: 1,797 grey images of 8 × 8 pixels, in 117 kB.

They are the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (UCI Machine Learning
Repository, https://doi.org/10.24432/C50P49, CC BY 4.0), as scikit-learn carries it. Shape suffixes: B images, P pixels.
"""

from __future__ import annotations

from importlib.resources import files

import torch
from safetensors.torch import load
from torch import Tensor


def load_digits() -> tuple[Tensor, Tensor]:
    """Pixels, counts from 0 to 16 row by row (float32 [B P = 64]), and the digits that they show (int64 [B])."""
    tensors = load((files(__name__) / "digits.safetensors").read_bytes())
    return tensors["images"].to(torch.float32), tensors["labels"].to(torch.int64)
