"""Why a barrier is set, as a value; its text, in reports, histories and answers, joins the reasons with `+`."""

from __future__ import annotations


class BarrierReasons(tuple[str, ...]):
    """Reasons of one barrier, in order, none twice.

    >>> BarrierReasons.parse("checkpoint+epoch+end")
    ('checkpoint', 'epoch', 'end')
    >>> str(BarrierReasons(("stop", "drain"))), BarrierReasons.parse("")
    ('stop+drain', ())
    """

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> BarrierReasons:
        """The reasons in a text; none in an empty one."""
        return cls(dict.fromkeys(text.split("+")) if text else ())

    def __str__(self) -> str:
        """As records and people have them: `checkpoint+epoch+end`."""
        return "+".join(self)
