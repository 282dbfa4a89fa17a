"""What a decoder is to the fuzzer, and the job that examples are of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import Message

from hetpipe.values.ids import Incarnation, VirtualWorkerIndex
from hetpipe.values.run_document import LifeSeen
from tests.server.shard.builders import run_document, shard_config, slices_of

Decode = Callable[[bytes], object]


@dataclass(frozen=True, slots=True)
class Decoder:
    """One decoder."""

    name: str
    decode: Decode
    examples: tuple[bytes, ...]
    message: type[Message] | None = None
    """The message it reads, so that its fields can be changed one by one."""


SHARD_CONFIG = shard_config(slices_of([3, 40]), stages=(1, 2), run_dir="/run")
RUN = run_document(SHARD_CONFIG)
LIVES = (LifeSeen(VirtualWorkerIndex(0), Incarnation(2), 1, "member"),)
