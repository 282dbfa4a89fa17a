"""`gpipe`: all forwards of a wave, then all its backwards (GPipe; PipeDream-2BW Figures 1a and 3).

The pipeline drains before the next wave, which the first stage ensures (`Gate.starts_drained`).
"""

from __future__ import annotations

from hetpipe.decide.schedule.policy import Action, Kind, StageView, Wait, nothing_ready


class GPipe:
    """No backward while forwards of the wave are outstanding."""

    def next_action(self, view: StageView) -> Action | Wait:
        """The next forward of the wave, else the next backward."""
        if view.more_forwards:
            return nothing_ready(view) if view.forward is None else Action(Kind.FORWARD, view.forward.p)
        return nothing_ready(view) if view.backward is None else Action(Kind.BACKWARD, view.backward.p)
