"""`1f1b` without exceptions: the order that policies need whose versions it defines (PipeDream §3.2; PipeOptim Fig. 1).

Forwards until S_i are in flight, then B F B F …, regardless of arrival times: while a forward is due, no backward runs,
even if the forward is delayed. The number of updates that a stage has made when a minibatch starts is thus a function
of its number, and "the newest weights" are the same in every run.
"""

from __future__ import annotations

from hetpipe.decide.schedule.policy import Action, Kind, StageView, Wait, nothing_ready


class StaticOneForwardOneBackward:
    """A forward within the limit while more are outstanding, else a backward."""

    def next_action(self, view: StageView) -> Action | Wait:
        """The next action of the strict order, or the wait for its inputs."""
        if view.num_in_flight < view.limit and view.more_forwards:
            return nothing_ready(view) if view.forward is None else Action(Kind.FORWARD, view.forward.p)
        return nothing_ready(view) if view.backward is None else Action(Kind.BACKWARD, view.backward.p)
