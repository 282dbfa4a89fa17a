"""One end of a cut that is to be linked: who is on either side, and within which bounds."""

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
    """Emulated time of what is sent."""

    def seen_from_there(self) -> Cut:
        """The same cut as the neighbour sees it."""
        return replace(self, own=self.neighbour, neighbour=self.own)

    @property
    def ends(self) -> Ends:
        """Who holds the two ends, in words."""
        return Ends(own=_words(self.own), peer=_words(self.neighbour))


class Door(Protocol):
    """Where the earlier stage of a cut awaits the later one. Open it before telling anyone its address."""

    @property
    def address(self) -> str:
        """`HOST:PORT`, for the neighbour."""
        ...

    def accept(self, *, deadline_seconds: float) -> Link:
        """The link, once the neighbour has come. Once.

        Raises:
            DeadlineExceeded: it did not come in time.
            PeerUnreachable: it came, and went away meanwhile.
        """
        ...

    def close(self) -> None:
        """Await nobody any more; harmless after `accept`."""
        ...


def _words(stage: Requester) -> str:
    return f"stage {stage.stage} of virtual worker {stage.vw}"
