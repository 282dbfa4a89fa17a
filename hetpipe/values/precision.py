"""The precision of a job: the format in which forward and backward passes compute (docs/semantics/precision.md)."""

from __future__ import annotations

from typing import Literal

Precision = Literal["fp32", "bf16"]
"""`fp32`: that of the model's own tensors. `bf16`: autocast to bfloat16, with fp32 weights and updates."""

#: Precision → the dtype that autocast computes in; none for `fp32`.
AUTOCAST_DTYPES: dict[Precision, str] = {"bf16": "bfloat16"}
