"""The precision of a job: the format in which forward and backward passes compute (docs/semantics/precision.md)."""

from __future__ import annotations

from typing import Literal

Precision = Literal["fp32", "bf16", "fp16"]
"""`fp32`: that of the model's own tensors. `bf16`, `fp16`: autocast to bfloat16 or float16, with fp32 weights and
updates; `fp16` scales losses."""

#: Precision → the dtype that autocast computes in; none for `fp32`.
AUTOCAST_DTYPES: dict[Precision, str] = {"bf16": "bfloat16", "fp16": "float16"}

#: Exponent of the largest scale 2^e of a loss. At 2^24 the smallest gradient that float16 can represent is below 1e-14.
LARGEST_SCALE_EXPONENT = 24
