"""Which published clock does a stage compute with, and are its weights here? (`wsp.md` §2, §3)

The first stage chooses the clock of each switch point; the others find it in the frames. Where no parameter servers
hold weights the clock in use never changes within a segment, but the first stage asks all the same: the answer says
where the next barrier is, and keeps it from being set behind minibatches that have begun.
"""

from __future__ import annotations

from hetpipe import failpoints
from hetpipe.decide.sync.gate import Gate
from hetpipe.errors import ClockNotPublished
from hetpipe.pipeline.inbox import Inbox
from hetpipe.pipeline.setup import StageParts
from hetpipe.values.ids import Clock, Minibatch, virtual_workers_text


class ClockUse:
    """The clock in use in one segment, which starts at `start`. The inbox's bell is held by who calls.

    Attributes:
        in_use: W*.
        wait_reason: why the last question was answered with no, and whether a clock must be published first.
    """

    def __init__(self, parts: StageParts, inbox: Inbox, start: Clock) -> None:
        self._parts = parts
        self._inbox = inbox
        self._gate = Gate(parts.sync, start)
        self.in_use = start
        self.wait_reason: tuple[str, bool] = ("", False)
        #: First stage: the latest switch point that has a clock, and that clock.
        self._chosen: tuple[int, Clock] | None = None
        #: Clocks that were asked for, and those of them of which nothing was heard.
        self._asked: set[Clock] = set()
        self._under_way: set[Clock] = set()

    def opens(self, p: Minibatch) -> bool:
        """First stage: whether the clock of `p` is chosen, and its weights are here."""
        if not self._may_change_at(p):
            return True
        if self._chosen is None or self._chosen[0] != p:
            clock = self._choose(p)
            if clock is None:
                return False
            self._chosen = (p, clock)
        return self.is_here(self._chosen[1])

    def chosen(self, p: Minibatch) -> Clock:
        """First stage: the clock of `p`, which `opens` has let in."""
        return self._chosen[1] if self._chosen is not None and self._chosen[0] == p else self.in_use

    def is_here(self, clock: Clock) -> bool:
        """Whether w^(clock) is here; asks for it if nobody did."""
        if clock == self.in_use or clock in self._inbox.fetched:
            return True
        if clock in self._inbox.lost:
            self._inbox.lost.discard(clock)
            self._asked.discard(clock)
        self._ask(clock, ahead=False)
        self.wait_reason = (f"w^({clock}) from the parameter servers", False)
        return False

    def fetch_ahead(self, begun: int) -> None:
        """Ask for the weights of the next switch point above minibatch `begun` as soon as they are published.

        A publish is heard in the middle of a computation, too: the weights then arrive while it lasts. One clock is
        fetched at a time, so that of several that are published close together only the newest is.
        """
        if not self._parts.has_shards:
            return
        self._under_way -= self._inbox.fetched.keys() | self._inbox.lost
        if self._under_way:
            return
        switch, published = self._next_switch(begun), self._inbox.log.published
        clock = self._gate.fetched_ahead(switch, in_use=self.in_use, published=published)
        if clock is not None:
            self._ask(clock, ahead=True)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _may_change_at(self, p: Minibatch) -> bool:
        return self._gate.is_switch_point(p) and self._gate.newest_usable(p) > self._gate.start

    def _choose(self, p: Minibatch) -> Clock | None:
        """W*(p), by the gate; None and a reason if it is not published yet."""
        sync, log = self._parts.sync, self._inbox.log
        awaited = self._gate.awaited(p, in_use=self.in_use)
        failpoints.reach("pull.before_gate")
        if log.published < awaited:
            failpoints.reach("pull.while_gated")
            behind = log.behind(awaited)
            who = virtual_workers_text(behind) if behind else "the parameter servers"
            self.wait_reason = (
                f"clock {awaited}, which minibatch {p} needs and {who} must finish first (published: {log.published})",
                True,
            )
            return None
        if sync.deterministic:
            return self._gate.chosen(p, in_use=self.in_use, published=log.published)
        try:
            clock, barrier = self._parts.synchroniser.hold(self._gate.switch_number(p))
        except ClockNotPublished:
            return None
        if log.barrier is None or log.barrier.clock != barrier:
            # The answer is ahead of what was read of the log: minibatches after `p` must know this barrier, too.
            self.wait_reason = (f"the record of the barrier at clock {barrier}", True)
            return None
        if p > barrier * sync.minibatches_per_wave:
            return None
        return clock if self._parts.has_shards else self._gate.start

    def _ask(self, clock: Clock, *, ahead: bool) -> None:
        if clock not in self._asked:
            self._asked.add(clock)
            self._under_way.add(clock)
            self._parts.synchroniser.fetch(clock, ahead=ahead)

    def _next_switch(self, begun: int) -> Minibatch:
        return self._gate.switch_minibatch(self._gate.switch_number(begun) + 1)
