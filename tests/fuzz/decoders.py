"""Every decoder of what a peer sends: its name, the function, and valid examples.

A decoder may raise the package's own errors and nothing else. One that reads text is given bytes that need not be text,
as the network delivers them.
"""

from __future__ import annotations

from itertools import chain

from tests.fuzz.decoder import Decoder
from tests.fuzz.json_decoders import document_decoders, json_decoders
from tests.fuzz.message_decoders import message_decoders
from tests.fuzz.raw_decoders import raw_decoders, redis_decoders, run_file_decoders

DECODERS: tuple[Decoder, ...] = tuple(
    chain(
        json_decoders(), document_decoders(), message_decoders(), raw_decoders(), redis_decoders(), run_file_decoders()
    )
)
