"""Verify the shards: waves staged, applied exactly once on every shard, clocks served (`wsp.md` §4)."""

from __future__ import annotations

from collections import Counter

from hetpipe.check.events import Apply, Commit, Pull, Staged
from hetpipe.check.facts import Facts
from hetpipe.check.report import Findings, Kind
from hetpipe.check.timeline import Life, Timeline


class ShardJudge:
    """Verifies staged, apply and pull lines; the lines of one file must come in order."""

    def __init__(self, facts: Facts, timeline: Timeline, findings: Findings) -> None:
        self._layout = facts.layout
        self._timeline = timeline
        self._findings = findings
        #: (vw, wave) → shard → its first apply.
        self._applied: dict[tuple[int, int], dict[int, Apply]] = {}
        self._twice: set[tuple[int, int]] = set()
        #: (vw, incarnation, wave) → (stage, shard) → slices staged.
        self._staged: dict[tuple[int, int, int], Counter[tuple[int, int]]] = {}
        self._first_staged: dict[tuple[int, int, int], Staged] = {}
        #: File → position up to which its shard provably followed the decision log.
        self._followed: dict[str, int] = {}
        self._unpublished: set[tuple[int, int, int]] = set()
        #: Virtual workers with an incarnation whose cut may differ from the plan.
        self._recut = {life.vw for life in timeline.lives.values() if not life.is_planned}

    def num_applied_twice(self) -> int:
        """Number of waves that some shard applied more than once."""
        return len(self._twice)

    def see_staged(self, staged: Staged) -> None:
        """Record staged slices, and verify that no evicted incarnation stages."""
        self._judge_slices(staged, "is staged on")
        key = (staged.vw, staged.incarnation, staged.wave)
        self._staged.setdefault(key, Counter())[staged.stage, staged.shard] += staged.slices
        self._first_staged.setdefault(key, staged)
        life = self._timeline.lives[staged.vw, staged.incarnation]
        if self._knows_eviction(staged, life):
            message = f"wave {staged.wave} of {_life(life)} is staged on shard {staged.shard} after its eviction"
            self._findings.add(Kind.OLD_INCARNATION, message, staged.origin)

    def see_apply(self, apply: Apply) -> None:
        """Verify that a wave is committed, and applied once."""
        key = (apply.vw, apply.wave)
        name = f"wave {apply.wave} of virtual worker {apply.vw}, incarnation {apply.incarnation}"
        if self._timeline.committed(apply.vw, apply.incarnation, apply.wave):
            position = self._timeline.commit_positions[key]
            self._followed[apply.origin.file] = max(self._followed.get(apply.origin.file, 0), position)
        elif not self._timeline.may_have_lost_commit(apply.vw, apply.incarnation, apply.wave):
            message = f"shard {apply.shard} applies {name}, which was never committed"
            self._findings.add(Kind.APPLIED_UNCOMMITTED, message, apply.origin)
        first = self._applied.setdefault(key, {}).setdefault(apply.shard, apply)
        if first is not apply:
            self._twice.add(key)
            message = f"shard {apply.shard} applies {name} again, after {first.origin.where}"
            self._findings.add(Kind.WAVE_APPLIED_TWICE, message, apply.origin)

    def see_pull(self, pull: Pull) -> None:
        """Verify that only published clocks are served."""
        self._judge_slices(pull, "pulls from")
        key = (pull.shard, pull.vw, pull.clock)
        if key not in self._unpublished and not self._timeline.is_published_before(pull.clock, pull.origin):
            self._unpublished.add(key)
            message = (
                f"shard {pull.shard} serves clock {pull.clock} to stage {pull.stage} of virtual worker {pull.vw} "
                "before it is published"
            )
            self._findings.add(Kind.UNPUBLISHED_PULL, message, pull.origin)

    def finish(self) -> None:
        """Report missing and late lines."""
        for commit in self._timeline.commits.values():
            self._judge_applies(commit)
            if commit.samples > 0:
                self._judge_staged(commit)
        for (vw, incarnation, wave), staged in self._first_staged.items():
            if self._is_stranded(vw, incarnation, wave):
                message = (
                    f"wave {wave} of virtual worker {vw}, incarnation {incarnation}, is staged and never committed"
                )
                self._findings.add(Kind.STAGED_UNCOMMITTED, message, staged.origin)

    def _knows_eviction(self, staged: Staged, life: Life) -> bool:
        """Whether the file proves that its shard knew of the eviction, by a later apply.

        Shard 0, too, executes the decisions of its own process after they are written.
        """
        if life.eviction_position is None:
            return False
        return self._followed.get(staged.origin.file, 0) > life.eviction_position

    def _judge_slices(self, event: Staged | Pull, does: str) -> None:
        """Verify the slices of a stage on a shard: none where the plan has none; without shards none at all."""
        if not self._may_have_slices(event):
            message = (
                f"stage {event.stage} of virtual worker {event.vw} {does} shard {event.shard}, "
                "which holds none of its slices"
            )
            self._findings.add(Kind.NO_SLICES, message, event.origin)

    def _may_have_slices(self, event: Staged | Pull) -> bool:
        """Whether a stage may have slices on the shard; always if the incarnation's cut may differ from the plan."""
        if (event.vw, event.stage, event.shard) in self._layout.num_slices:
            return True
        if isinstance(event, Staged):
            is_planned = self._timeline.lives[event.vw, event.incarnation].is_planned
        else:
            is_planned = event.vw not in self._recut
        return not is_planned and self._layout.slices_on(event.shard) > 0

    def _judge_applies(self, commit: Commit) -> None:
        line = self._timeline
        name = f"wave {commit.wave} of virtual worker {commit.vw}"
        applied = self._applied.get((commit.vw, commit.wave), {})
        missing = [shard for shard in range(self._layout.num_shards) if shard not in applied]
        published = line.published is not None and commit.wave < line.published
        if missing and (line.complete or published):
            if applied:
                where = f"applied on shards {sorted(applied)} but not on shards {missing}"
                self._findings.add(Kind.TORN_WAVE, f"{name} is torn: {where}", commit.origin)
            else:
                self._findings.add(Kind.NEVER_APPLIED, f"{name} is committed but never applied", commit.origin)
        publish = line.publishes.get(commit.wave + 1)
        if publish is None:
            return
        for shard, apply in applied.items():
            if not apply.origin.may_precede(publish.origin):
                message = (
                    f"clock {publish.clock} is published {apply.origin.t - publish.origin.t:.6f} s before "
                    f"shard {shard} applies {name}"
                )
                self._findings.add(Kind.PUBLISH_EARLY, message, publish.origin)

    def _judge_staged(self, commit: Commit) -> None:
        staged = self._staged.get((commit.vw, commit.incarnation, commit.wave), Counter())
        life = self._timeline.lives.get((commit.vw, commit.incarnation))
        is_planned = life is None or life.is_planned
        for shard in range(self._layout.num_shards):
            if not is_planned:
                whole = sum(count for (_, place), count in staged.items() if place == shard)
                self._judge_part(commit, whole, self._layout.slices_on(shard), f"are staged on shard {shard}")
                continue
            for stage in range(self._layout.stages_of(commit.vw)):
                wanted = self._layout.num_slices.get((commit.vw, stage, shard), 0)
                where = f"of stage {stage} are staged on shard {shard}"
                self._judge_part(commit, staged[stage, shard], wanted, where)

    def _judge_part(self, commit: Commit, found: int, wanted: int, where: str) -> None:
        if found < wanted:
            message = (
                f"wave {commit.wave} of virtual worker {commit.vw} is committed, but only {found} of {wanted} slices "
                f"{where}"
            )
            self._findings.add(Kind.COMMITTED_UNSTAGED, message, commit.origin)

    def _is_stranded(self, vw: int, incarnation: int, wave: int) -> bool:
        """Whether a staged wave should have been committed: its incarnation reached the run's end, past the wave.

        An empty wave at or after the last barrier is dropped by it (`wsp.md` §5).
        """
        line = self._timeline
        if line.end is None or line.members.get(vw) != incarnation or wave >= line.end.clock:
            return False
        return not line.committed(vw, incarnation, wave)


def _life(life: Life) -> str:
    return f"virtual worker {life.vw}, incarnation {life.incarnation},"
