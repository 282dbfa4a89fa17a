"""Report on a history: number of checks, and violations with their locations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypedDict

from hetpipe.checker.events import Origin

#: Limit of violations of one kind to show or put into `details`; the others are only counted.
SHOWN_PER_KIND = 20


class Kind(StrEnum):
    """Kinds of violations. Each member's comment is the violated invariant."""

    STALE_CLOCK = "stale_clock"  #: a minibatch starts with a clock ≥ required_clock and ≥ its barrier
    NOT_REQUIRED_CLOCK = "not_required_clock"  #: deterministic, or no shards: it starts with exactly that clock
    NEEDLESS_PULL = "needless_pull"  #: with `pull: required` another clock comes only where D forbids the one in use
    WRONG_LOCAL_THROUGH = "wrong_local_through"  #: v(p) is the table's for stage and direction, or the barrier's
    CLOCK_BEYOND_LOCAL = "clock_beyond_local"  #: W*·N ≤ v(p): own updates of later waves are never in w^(W*)
    UNPUBLISHED_CLOCK = "unpublished_clock"  #: a clock is published before a forward uses it
    UNPUBLISHED_PULL = "unpublished_pull"  #: a clock is published before a shard serves it
    MIXED_VERSIONS = "mixed_versions"  #: one minibatch, one published clock: all stages, forward and backward
    CLOCK_SWITCH = "clock_switch"  #: the clock in use changes at switch points only
    MINIBATCH_TWICE = "minibatch_twice"  #: one forward and one backward of p per stage
    MINIBATCH_MISSING = "minibatch_missing"  #: no minibatch and no pass of it is left out
    MINIBATCH_ORDER = "minibatch_order"  #: forward, backward and step of p, in this order
    OUT_OF_ORDER = "out_of_order"  #: a stage takes forwards in the order of p, and backwards too
    BACKWARD_EARLY = "backward_early"  #: strict 1F1B, gpipe: no backward while another forward is due
    IN_FLIGHT = "in_flight"  #: at most S_i minibatches between forward and backward
    NOT_DRAINED = "not_drained"  #: all backwards before a barrier, under flush of a wave, come before what follows
    STEP_TWICE = "step_twice"  #: one step per update
    STEP_MISSING = "step_missing"  #: no update is left out
    STEP_ORDER = "step_order"  #: updates step in the order of p
    STEP_UNDUE = "step_undue"  #: an update is made where a group of minibatches is full, or before a barrier
    UPDATE_NOT_READY = "update_not_ready"  #: a pass of p starts only after the step of its v(p)
    NOT_NEWEST = "not_newest"  #: where the policy says newest, no update that the stage has is left out
    SKIPPED_APART = "skipped_apart"  #: an update is skipped by all stages (allreduce: and replicas), or by none
    REPLICA_AHEAD = "replica_ahead"  #: allreduce: an update comes after the wave's backwards of all replicas
    WAVE_APPLIED_TWICE = "wave_applied_twice"  #: a shard applies a wave once
    TORN_WAVE = "torn_wave"  #: a wave is applied on all shards or on none
    NEVER_APPLIED = "never_applied"  #: a committed wave is applied
    APPLIED_UNCOMMITTED = "applied_uncommitted"  #: only committed waves are applied
    STAGED_UNCOMMITTED = "staged_uncommitted"  #: a finished run commits what its members staged
    COMMITTED_UNSTAGED = "committed_unstaged"  #: a commit needs every stage's part on every shard
    NO_SLICES = "no_slices"  #: only what a shard holds is staged there and pulled from it
    COMMIT_ORDER = "commit_order"  #: a VW's waves are committed one by one
    COMMIT_EARLY = "commit_early"  #: wave c is committed once clock c - D is published
    COMMIT_PAST_BARRIER = "commit_past_barrier"  #: no wave ≥ c is committed before the barrier at c is published
    CLOCK_DISTANCE = "clock_distance"  #: c_v - c_g ≤ D + 1
    PUBLISH_EARLY = "publish_early"  #: clock W: every member's wave W - 1 is committed, every shard applied it
    CLOCK_FELL = "clock_fell"  #: clocks never fall
    CLOCK_REPEATED = "clock_repeated"  #: a clock is published once
    CLOCK_SKIPPED = "clock_skipped"  #: clocks are published one by one
    WAVE_SIZE = "wave_size"  #: N_v and the numbers of minibatches are what the job and its script say
    WAVE_SHARE = "wave_share"  #: between two barriers minibatches are dealt in proportion to N_v
    PLAN = "plan"  #: plan versions grow, take effect at barriers, and give each layer to one stage
    PLAN_VERSION = "plan_version"  #: each pass of p carries the newest plan version with from ≤ p
    LAYER_COVERAGE = "layer_coverage"  #: each layer of p is computed exactly once forward and once backward
    SLICE_NOT_OWNED = "slice_not_owned"  #: a stage stages slices of its own layers in that wave only
    FREEZE = "freeze"  #: F is what the job says at each barrier, never falls, and stands for the model's first layers
    FROZEN_COUNT = "frozen_count"  #: each pass, update and wave carries the F in force
    FROZEN_TRAINED = "frozen_trained"  #: frozen layers have no backward, no update and no staged slice
    ACTIVATE = "activate"  #: inactive layers, and those built anew, are those that the job says at each barrier
    FRESH = "fresh"  #: each stage builds anew what is due before it computes, and all virtual workers the same
    INACTIVE_LAYERS = "inactive_layers"  #: each pass, update and wave leaves out the stage's inactive layers, no others
    INACTIVE_STAGED = "inactive_staged"  #: no slice of an inactive layer is staged
    FROZEN_CROSSED = "frozen_crossed"  #: a minibatch crosses each frozen layer once, computed or spared by the cache
    CACHE_READ = "cache_read"  #: what is read from a cache was kept there before, behind frozen layers
    CACHED_TWICE = "cached_twice"  #: no minibatch is computed in a frozen layer again while the node's cache has it
    MEMORY_POLICY = "memory_policy"  #: a layer has the memory policy of the script from its moment on, and no other
    SAMPLE_TWICE = "sample_twice"  #: a sample counts once per epoch
    SAMPLE_NEVER = "sample_never"  #: every sample counts in an epoch that ended
    SAMPLE_COUNT = "sample_count"  #: commit, used samples and minibatches agree
    SAMPLE_UNKNOWN = "sample_unknown"  #: samples are in range and of the epoch under way
    SAMPLE_UNCOMMITTED = "sample_uncommitted"  #: samples are used with a commit only
    OLD_INCARNATION = "old_incarnation"  #: an evicted life takes no part
    OLD_TERM = "old_term"  #: terms only grow
    MEMBERSHIP = "membership"  #: evictions, joins and participants fit the plan
    HANDOVER = "handover"  #: who takes over begins with the state that the one before it has left, or all anew
    BARRIER = "barrier"  #: a barrier lies ahead of everything committed and published
    WRONG_TOTAL = "wrong_total"  #: a run that ended did all the work it was given
    PAST_END = "past_end"  #: nothing starts behind the last barrier
    MALFORMED_LINE = "malformed_line"  #: every line is a whole event
    INCOMPLETE = "incomplete"  #: the run ended (asked for by the caller)


@dataclass(frozen=True, slots=True)
class Violation:
    """One violated invariant."""

    kind: Kind
    message: str
    """One sentence with the numbers."""
    where: str
    """`FILE:LINE` of the violating line, or of the one that requires a missing one."""


class Findings:
    """Collector of violations."""

    def __init__(self) -> None:
        self._violations: list[Violation] = []

    def add(self, kind: Kind, message: str, origin: Origin | None = None) -> None:
        """Record a violation found at `origin` (None: no line)."""
        self.add_at(kind, message, origin.where if origin is not None else "history")

    def add_at(self, kind: Kind, message: str, where: str) -> None:
        """Record a violation at `where`, a `FILE:LINE`."""
        self._violations.append(Violation(kind, message, where))

    def count(self, kind: Kind) -> int:
        """Number of violations of `kind` so far."""
        return sum(1 for violation in self._violations if violation.kind is kind)

    def violations(self) -> tuple[Violation, ...]:
        """All violations, in order of detection."""
        return tuple(self._violations)


@dataclass(frozen=True, slots=True)
class Counts:
    """Number of verified items."""

    events: int = 0
    waves: int = 0
    """Waves committed, over all virtual workers, empty ones included."""
    samples: int = 0
    """Samples committed."""
    published_clock: int | None = None
    """The last published clock; None if none was."""
    max_clock_distance: int = 0
    """Largest c_v - c_g at any commit."""
    bound_clock_distance: int | None = None
    """D + 1; None for D = ∞."""
    unknown_events: int = 0
    """Lines of unknown events, which were not judged."""
    complete: bool = False
    """The run reached its end, or was stopped at a barrier."""
    skipped_updates: int = 0
    """Updates skipped because a gradient overflowed, over all virtual workers."""


class Detail(TypedDict):
    """A violation as JSON."""

    kind: str
    message: str
    where: str


class ReportJson(TypedDict):
    """Output of `hetpipe check --json`."""

    weights: str
    schedule: str
    history: str
    minibatches: int
    violations: int
    waves_applied_twice: int
    torn_waves: int
    waves: int
    samples: int
    max_clock_distance: int
    complete: bool
    skipped_updates: int
    lacking: list[str]
    kinds: dict[str, int]
    details: list[Detail]


@dataclass(frozen=True, slots=True)
class Report:
    """Result of the verification of one run."""

    weights: str
    """The weight policy by which it was judged."""
    schedule: str
    """The schedule by which it was judged, `auto` decided."""
    minibatches: int
    """Distinct minibatches that were started, over all virtual workers."""
    violations: tuple[Violation, ...]
    waves_applied_twice: int
    """Waves that at least one shard applied more than once."""
    torn_waves: int
    """Committed waves that some shards applied and others did not."""
    counts: Counts = field(default_factory=Counts)
    history: str = "full"
    """Level of detail of the history: of a `summary` less is verified."""
    lacking: tuple[str, ...] = ()
    """Files that lack lines, because their disk failed: then nothing that seems wrong is a violation, and nothing that
    seems right is proven."""

    @property
    def ok(self) -> bool:
        """Whether everything was verified and no violation was found."""
        return not self.violations and not self.lacking

    def kinds(self) -> dict[str, int]:
        """Kind → number of violations, in order of first occurrence."""
        return dict(Counter(violation.kind.value for violation in self.violations))

    def to_json(self) -> ReportJson:
        """The report as JSON-able values; `details` holds at most `SHOWN_PER_KIND` violations of each kind."""
        return ReportJson(
            weights=self.weights,
            schedule=self.schedule,
            history=self.history,
            minibatches=self.minibatches,
            violations=len(self.violations),
            waves_applied_twice=self.waves_applied_twice,
            torn_waves=self.torn_waves,
            waves=self.counts.waves,
            samples=self.counts.samples,
            max_clock_distance=self.counts.max_clock_distance,
            complete=self.counts.complete,
            skipped_updates=self.counts.skipped_updates,
            lacking=list(self.lacking),
            kinds=self.kinds(),
            details=[Detail(kind=v.kind.value, message=v.message, where=v.where) for v in self._shown()],
        )

    def lines(self) -> list[str]:
        """Report as text: a line of counts, one sentence per violation, the verdict last."""
        counts = self.counts
        bound = "unbounded" if counts.bound_clock_distance is None else f"bound {counts.bound_clock_distance}"
        clock = "no clock" if counts.published_clock is None else f"clock {counts.published_clock}"
        judged = (
            f"judged {_number(counts.events, 'event')} by weights {self.weights} and schedule {self.schedule}: "
            f"{_number(self.minibatches, 'minibatch', 'minibatches')}, "
            f"{_number(counts.waves, 'wave')} committed, "
            f"{_number(counts.skipped_updates, 'update') + ' skipped, ' if counts.skipped_updates else ''}"
            f"{clock} published, largest clock distance {counts.max_clock_distance} ({bound}), "
            f"run {'ended' if counts.complete else 'cut short'}"
        )
        lines = [judged]
        if counts.unknown_events:
            lines.append(f"not judged: {_number(counts.unknown_events, 'line')} of events unknown to this checker")
        if self.history == "summary":
            lines.append(
                "not judged, because the history is a summary: which weights and own updates each minibatch saw, the "
                "order of work within a wave, and when updates were made"
            )
        lines += [f"{v.kind.value}: {v.message} ({v.where})" for v in self._shown()]
        for kind, number in self.kinds().items():
            if number > SHOWN_PER_KIND:
                lines.append(f"{kind}: {number - SHOWN_PER_KIND} more like these")
        lines.append(self._verdict())
        return lines

    def _verdict(self) -> str:
        if self.lacking:
            files = ", ".join(self.lacking)
            return (
                f"verdict: history incomplete: the disk failed under {files}; the run can neither be proven nor blamed"
            )
        if self.ok:
            return "verdict: no violation"
        return (
            f"verdict: {_number(len(self.violations), 'violation')}; "
            f"{_number(self.waves_applied_twice, 'wave')} applied twice, {_number(self.torn_waves, 'torn wave')}"
        )

    def _shown(self) -> list[Violation]:
        seen: Counter[Kind] = Counter()
        shown: list[Violation] = []
        for violation in self.violations:
            seen[violation.kind] += 1
            if seen[violation.kind] <= SHOWN_PER_KIND:
                shown.append(violation)
        return shown


def _number(count: int, one: str, many: str = "") -> str:
    """`1 wave`, `2 waves`."""
    return f"{count} {one if count == 1 else many or one + 's'}"
