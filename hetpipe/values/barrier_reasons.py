"""Reasons of a barrier as a value; in reports, histories and replies they are joined with `+`."""

from __future__ import annotations


class BarrierReasons(tuple[str, ...]):
    """The reasons of one barrier, in order and without duplicates.

    >>> BarrierReasons.parse("checkpoint+epoch+end")
    ('checkpoint', 'epoch', 'end')
    >>> str(BarrierReasons(("stop", "drain"))), BarrierReasons.parse("")
    ('stop+drain', ())
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> BarrierReasons:
        """Parse reasons joined with `+`; an empty text has none."""
        return cls(dict.fromkeys(text.split("+")) if text else ())

    def __str__(self) -> str:
        """The text form used in records and messages: `checkpoint+epoch+end`."""
        return "+".join(self)
