"""One end of a cut to be linked: the stages on either side, and the limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from hetpipe.link.frame_queue import Ends
from hetpipe.link.policy import Link, LinkLimits
from hetpipe.values.requests import Requester
from hetpipe.values.run import LinkTime


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A cut between two neighbouring stages, as one of them sees it."""

    own: Requester
    neighbour: Requester
    limits: LinkLimits
    pace: LinkTime | None = None
    """Emulated transfer time of outgoing frames."""

    def seen_from_there(self) -> Cut:
        """The same cut from the neighbour's side."""
        return replace(self, own=self.neighbour, neighbour=self.own)

    @property
    def ends(self) -> Ends:
        """Names of the two ends."""
        return Ends(own=_words(self.own), peer=_words(self.neighbour))


class CutListener(Protocol):
    """Listening end of a cut, at the earlier stage. Open it before publishing its address."""

    @property
    def address(self) -> str:
        """`HOST:PORT`, for the neighbour."""
        ...

    @property
    def refusal(self) -> str:
        """The reason why the accepted link uses gRPC instead of shared memory; empty if it does not."""
        ...

    def accept(self, *, deadline_seconds: float) -> Link:
        """Wait for the neighbour and return the link. May be called once.

        Raises:
            DeadlineExceeded: it did not connect in time.
            PeerUnreachable: it connected, but disconnected again.
        """
        ...

    def close(self) -> None:
        """Stop listening; no effect after `accept`."""
        ...


def _words(stage: Requester) -> str:
    return f"stage {stage.stage} of virtual worker {stage.vw}"
