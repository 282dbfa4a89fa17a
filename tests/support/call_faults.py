"""Which faults a call meets on its way: chosen by chance, from a seed, before anything is done.

Pure: the same seed, rules, method and number of the call give the same fate, whatever other calls do meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase


class Deed(StrEnum):
    """What was done to a call."""

    DELAYED = "delayed"
    HELD_BACK = "held back"
    """Until another call had overtaken it."""
    REQUEST_DROPPED = "request dropped"
    """The server has seen nothing, the client is told that the connection broke."""
    REPLY_DROPPED = "reply dropped"
    """The server has done everything, the client is told that the connection broke."""
    REPEATED = "repeated"
    """Sent twice; the client got the second answer."""
    REPEATED_LATE = "repeated late"
    """Sent once more after the client had its answer; the second one was thrown away."""
    REQUEST_BROKEN = "request broken off"
    """Some messages of the request have arrived, its end has not."""
    REPLY_BROKEN = "reply broken off"
    """The client got some messages of the reply."""
    REQUEST_FLIPPED = "request flipped"
    """One bit of one message."""
    REPLY_FLIPPED = "reply flipped"
    CUT = "cut"
    """It met a connection that is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often each fault happens to calls whose full name matches. All but `method` are chances from 0 to 1."""

    method: str = "*"
    """A pattern, as of file names, for `/package.Service/Method`."""
    delay: float = 0.0
    longest_delay_seconds: float = 0.01
    """A delay takes any time up to this."""
    hold_back: float = 0.0
    """For calls of which others are under way at the same time."""
    drop_request: float = 0.0
    drop_reply: float = 0.0
    repeat: float = 0.0
    """Never for calls that go on for ever: the second begins after the first has ended."""
    repeat_late: float = 0.0
    break_request: float = 0.0
    break_reply: float = 0.0
    flip_request: float = 0.0
    """Never the first message, which is a header that no checksum covers."""
    flip_reply: float = 0.0


@dataclass(frozen=True, slots=True)
class Flip:
    """One bit of a stream of messages."""

    message: int
    """Position in the stream."""
    place: float
    """Where in the message, from [0, 1)."""

    def apply(self, message: bytes) -> bytes:
        """The message with the bit the other way."""
        bit = int(self.place * len(message) * 8)
        flipped = bytearray(message)
        flipped[bit // 8] ^= 1 << bit % 8
        return bytes(flipped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What one call meets."""

    delay_seconds: float = 0.0
    hold_back: bool = False
    drop_request: bool = False
    drop_reply: bool = False
    repeat: bool = False
    repeat_late_seconds: float | None = None
    """When after the answer; None: not at all."""
    request_messages: int | None = None
    """The request breaks off behind so many; None: it does not."""
    reply_messages: int | None = None
    flip_request: Flip | None = None
    flip_reply: Flip | None = None


#: What calls meet that no rule is for.
UNHARMED = Fate()

#: Streams break off, and bits flip, among this many first messages.
_EARLY_MESSAGES = 3


def fate_of(rules: Sequence[Faults], method: str, *, seed: int, number: int) -> Fate:
    """What call number `number` of `method` meets by the first rule that matches."""
    faults = next((rule for rule in rules if fnmatchcase(method, rule.method)), None)
    if faults is None:
        return UNHARMED
    chance = random.Random(f"{seed} {method} {number}")

    def happens(probability: float) -> bool:
        return chance.random() < probability  # always drawn, so that one rule changed leaves the others' outcomes

    def flip(probability: float, first: int) -> Flip | None:
        place = Flip(first + chance.randrange(_EARLY_MESSAGES), chance.random())
        return place if happens(probability) else None

    seconds = faults.longest_delay_seconds * chance.random()
    messages = 1 + chance.randrange(_EARLY_MESSAGES)
    return Fate(
        delay_seconds=seconds if happens(faults.delay) else 0.0,
        hold_back=happens(faults.hold_back),
        drop_request=happens(faults.drop_request),
        drop_reply=happens(faults.drop_reply),
        repeat=happens(faults.repeat),
        repeat_late_seconds=seconds if happens(faults.repeat_late) else None,
        request_messages=messages if happens(faults.break_request) else None,
        reply_messages=messages if happens(faults.break_reply) else None,
        flip_request=flip(faults.flip_request, first=1),
        flip_reply=flip(faults.flip_reply, first=0),
    )
