"""The line in the log for every call that is refused, and so the one place that says what a refusal is.

The log escapes and cuts what peers send (`observe.log`); here it is cut further, for a peer that is refused may be one
that wants the log to be long.
"""

from __future__ import annotations

from hetpipe.observe.log import get_logger

_log = get_logger(__name__)

#: Characters of a peer's, a call's and an identity's name, and of a sentence.
MAX_NAME_CHARACTERS = 200
MAX_SENTENCE_CHARACTERS = 1_000


def refused(call: str, *, peer: str, identity: str, error: str, sentence: str) -> None:
    """A call is refused.

    Args:
        call: its full name, as the peer wrote it.
        peer: the address it came from.
        identity: who the peer's certificate says it is; empty without TLS, or if it says nothing that we know.
        error: class name of the error.
        sentence: what the peer is told.
    """
    _log.info(
        "call_refused",
        call=call[:MAX_NAME_CHARACTERS],
        peer=peer[:MAX_NAME_CHARACTERS],
        identity=identity[:MAX_NAME_CHARACTERS],
        error=error,
        sentence=sentence[:MAX_SENTENCE_CHARACTERS],
    )
