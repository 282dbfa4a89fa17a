"""`fifo`: HetPipe's three rules (HetPipe §4, Partition Scheduling).

Forwards in order, backwards in order, and of two ready ones the one whose inputs arrived first.
"""

from __future__ import annotations

from hetpipe.decide.schedule.policy import Action, Kind, StageView, Wait, nothing_ready


class Fifo:
    """First come, first served."""

    def next_action(self, view: StageView) -> Action | Wait:
        """The ready action whose inputs arrived first."""
        forward = view.forward if view.num_in_flight < view.limit else None
        backward = view.backward
        if forward is not None and (backward is None or forward.arrival < backward.arrival):
            return Action(Kind.FORWARD, forward.p)
        if backward is not None:
            return Action(Kind.BACKWARD, backward.p)
        return nothing_ready(view)
