"""`1f1b`: fill the pipeline up to S_i, then one backward for each forward (PipeDream §3.2).

Whenever a minibatch may enter (fewer than S_i in flight), its forward runs first; once S_i are in flight, only a
backward can. With inputs that come in time this is the strict order F…F B F B F …; where a forward is held up, by the
gate for instance, the backwards that are ready go on (HetPipe §5: injected minibatches continue while a worker waits).
"""

from __future__ import annotations

from hetpipe.decide.schedule.policy import Action, Kind, StageView, Wait, nothing_ready


class OneForwardOneBackward:
    """Forward first while the limit of minibatches in flight allows."""

    def next_action(self, view: StageView) -> Action | Wait:
        """The next forward within the limit, else the next backward."""
        if view.forward is not None and view.num_in_flight < view.limit:
            return Action(Kind.FORWARD, view.forward.p)
        if view.backward is not None:
            return Action(Kind.BACKWARD, view.backward.p)
        return nothing_ready(view)
