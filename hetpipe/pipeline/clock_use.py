"""The published clock that a stage computes with, and the availability of its weights (`wsp.md` §2, §3).

The first stage chooses the clock of each switch point; the others read it from the frames. Without parameter servers
the clock in use never changes within a segment, but the first stage still sends the hold request: the reply contains
the next barrier, and prevents it from being set before minibatches that have already started.
"""

from __future__ import annotations

import math

from hetpipe import failpoints
from hetpipe.decide.sync.gate import Gate
from hetpipe.errors import ClockNotPublished
from hetpipe.pipeline.inbox import Inbox
from hetpipe.pipeline.setup import StageParts
from hetpipe.values.ids import Clock, Minibatch, virtual_workers_text


class ClockUse:
    """The clock in use in one segment, which starts at `start`. The caller holds the inbox's condition.

    Attributes:
        in_use: W*.
        wait_reason: reason of the last negative answer, and whether it waits for a clock to be published.
    """

    def __init__(self, parts: StageParts, inbox: Inbox, start: Clock) -> None:
        self._parts = parts
        self._inbox = inbox
        self._gate = Gate(parts.sync, start)
        self.in_use = start
        self.wait_reason: tuple[str, bool] = ("", False)
        #: First stage: the latest switch point with a chosen clock, and that clock.
        self._chosen: tuple[int, Clock] | None = None
        #: Requested clocks, and those of them without a reply yet.
        self._requested: set[Clock] = set()
        self._under_way: set[Clock] = set()

    def opens(self, p: Minibatch) -> bool:
        """First stage: whether the clock of `p` is chosen and its weights are available."""
        if not self._may_change_at(p):
            return True
        if self._chosen is None or self._chosen[0] != p:
            clock = self._choose(p)
            if clock is None:
                return False
            self._chosen = (p, clock)
        return self.is_here(self._chosen[1])

    def foretold(self, p: Minibatch, after: Minibatch, used: Clock) -> Clock | None:
        """The clock of `p`, if it is published and its weights are here; None: not yet.

        `used` is that of minibatch `after` < `p`. It may change in between in deterministic runs only.
        """
        if not self._parts.has_shards:
            return self.in_use
        for switch in filter(self._may_change_at, map(Minibatch, range(after + 1, p + 1))):
            chosen = self._gate.chosen(switch, in_use=used, published=self._inbox.log.published)
            if chosen is None:
                return None
            used = chosen
        return used if self.is_here(used) else None

    def chosen(self, p: Minibatch) -> Clock:
        """First stage: the clock of `p`, for which `opens` returned True."""
        return self._chosen[1] if self._chosen is not None and self._chosen[0] == p else self.in_use

    def is_here(self, clock: Clock) -> bool:
        """Whether w^(clock) is available; requests it if it was not requested yet."""
        if clock == self.in_use or clock in self._inbox.fetched:
            return True
        if clock in self._inbox.lost:
            self._inbox.lost.discard(clock)
            self._requested.discard(clock)
        self._fetch(clock, ahead=False)
        self.wait_reason = (f"w^({clock}) from the parameter servers", False)
        return False

    def forget_requests(self) -> None:
        """Fetch all weights anew: those here were of other layers, and are dropped."""
        self._requested.clear()
        self._under_way.clear()

    def fetch_ahead(self, begun: int, *, below: float = math.inf) -> None:
        """Request the weights of the next switch point after minibatch `begun` as soon as they are published.

        Not if it is at `below` or later, which another version of the plan computes.

        Publish records are processed during computations as well, so that the transfer overlaps with them. One clock is
        fetched at a time: of several clocks published in quick succession only the newest is fetched.
        """
        if not self._parts.has_shards:
            return
        self._under_way -= self._inbox.fetched.keys() | self._inbox.lost
        if self._under_way or self._next_switch(begun) >= below:
            return
        switch, published = self._next_switch(begun), self._inbox.log.published
        clock = self._gate.fetched_ahead(switch, in_use=self.in_use, published=published)
        if clock is not None:
            self._fetch(clock, ahead=True)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _may_change_at(self, p: Minibatch) -> bool:
        return self._gate.is_switch_point(p) and self._gate.newest_usable(p) > self._gate.start

    def _choose(self, p: Minibatch) -> Clock | None:
        """W*(p) according to the gate; None, with the reason set, if it is not published yet."""
        sync, log = self._parts.sync, self._inbox.log
        awaited = self._gate.awaited(p, in_use=self.in_use)
        failpoints.reach("pull.before_gate")
        if log.published < awaited:
            failpoints.reach("pull.while_gated")
            behind = log.behind(awaited)
            own, published = p + self._parts.shift, log.published
            who = virtual_workers_text(behind) if behind else "the parameter servers"
            self.wait_reason = (
                f"clock {awaited}, which minibatch {own} needs and {who} must finish first (published: {published})",
                True,
            )
            return None
        if sync.deterministic:
            return self._gate.chosen(p, in_use=self.in_use, published=log.published)
        try:
            clock, barrier, num_moves = self._parts.synchroniser.hold(self._gate.switch_number(p))
        except ClockNotPublished:
            return None
        identity = self._parts.identity
        if log.barrier is None or log.barrier.clock != barrier:
            # The reply is newer than the records read so far: minibatches after `p` need this barrier, too.
            unread = f"barrier at clock {barrier}"
        elif len(log.moves_of(identity.vw, identity.incarnation)) < num_moves:
            unread = "move of layers"
        else:
            unread = ""
        if unread:
            self.wait_reason = (f"the record of the {unread}", True)
            return None
        if p > barrier * sync.minibatches_per_wave:
            return None
        return clock if self._parts.has_shards else self._gate.start

    def _fetch(self, clock: Clock, *, ahead: bool) -> None:
        if clock not in self._requested:
            self._requested.add(clock)
            self._under_way.add(clock)
            self._parts.synchroniser.fetch(clock, ahead=ahead)

    def _next_switch(self, begun: int) -> Minibatch:
        return self._gate.switch_minibatch(self._gate.switch_number(begun) + 1)
