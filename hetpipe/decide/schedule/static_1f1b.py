"""`1f1b` without exceptions: the order that policies need whose versions it defines (PipeDream §3.2; PipeOptim Fig. 1).

Forwards until S_i are in flight, then B F B F …, whatever comes when: while a forward is due, no backward runs, even if
the forward is held up. So the number of updates that a stage has made when a minibatch begins is a function of its
number, and "the newest weights" mean the same in every run.
"""

from __future__ import annotations

from hetpipe.decide.schedule.policy import Action, Kind, StageView, Wait, nothing_ready


class StaticOneForwardOneBackward:
    """A forward while there is room and more are to come, else a backward."""

    def next_action(self, view: StageView) -> Action | Wait:
        """See `Order`."""
        if view.num_in_flight < view.limit and view.more_forwards:
            return nothing_ready(view) if view.forward is None else Action(Kind.FORWARD, view.forward.p)
        return nothing_ready(view) if view.backward is None else Action(Kind.BACKWARD, view.backward.p)
