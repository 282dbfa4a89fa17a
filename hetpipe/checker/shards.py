"""Verify the shards: waves staged, applied exactly once on every shard, clocks served (`wsp.md` §4)."""

from __future__ import annotations

from collections import Counter

from hetpipe.checker.events import Apply, Commit, Pull, Staged
from hetpipe.checker.facts import Facts
from hetpipe.checker.report import Findings, Kind
from hetpipe.checker.timeline import Life, Timeline


class ShardVerifier:
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
        #: Cut and layers that are not trained → (stage, shard) → slices; and slices on each shard, of all stages.
        self._num_slices: dict[tuple[tuple[int, ...], frozenset[int]], Counter[tuple[int, int]]] = {}
        self._on_shard = Counter(shard for _, shard in facts.layout.slices)
        #: The layer of each slice, per shard.
        self._layers = {shard: facts.layout.layers_on(shard) for shard in range(facts.layout.num_shards)}

    def num_applied_twice(self) -> int:
        """Number of waves that some shard applied more than once."""
        return len(self._twice)

    def see_staged(self, staged: Staged) -> None:
        """Record staged slices, and verify that no evicted incarnation stages."""
        has_slices = self._verify_slices(staged, "is staged on")
        key = (staged.vw, staged.incarnation, staged.wave)
        self._staged.setdefault(key, Counter())[staged.stage, staged.shard] += staged.slices
        self._first_staged.setdefault(key, staged)
        life = self._timeline.lives[staged.vw, staged.incarnation]
        if has_slices:
            self._verify_owned(staged, life.bounds_at(staged.wave))
            self._verify_trained(staged)
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
        self._verify_slices(pull, "pulls from")
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
            self._verify_applies(commit)
            if commit.samples > 0:
                self._verify_staged(commit)
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

    def _verify_slices(self, event: Staged | Pull, does: str) -> bool:
        """Verify the slices of a stage on a shard: none where the plan has none; without shards none at all."""
        may = self._may_have_slices(event)
        if not may:
            message = (
                f"stage {event.stage} of virtual worker {event.vw} {does} shard {event.shard}, "
                "which holds none of its slices"
            )
            self._findings.add(Kind.NO_SLICES, message, event.origin)
        return may

    def _may_have_slices(self, event: Staged | Pull) -> bool:
        """Whether a stage may have slices on the shard: by the cut in force, or by any that its virtual worker had."""
        if isinstance(event, Staged):
            cuts: list[tuple[int, ...] | None] = [
                self._timeline.lives[event.vw, event.incarnation].bounds_at(event.wave)
            ]
        else:
            # Processes start, and pull first, by the plan of the run, even if layers have moved since.
            cuts = [*self._layout.bounds[event.vw : event.vw + 1]]
            cuts += [cut for life in self._timeline.lives_of(event.vw) for cut in life.cuts]
        return any(
            self._on_shard[event.shard] > 0 if cut is None else self._slices(cut)[event.stage, event.shard] > 0
            for cut in cuts
        )

    def _verify_owned(self, staged: Staged, bounds: tuple[int, ...] | None) -> None:
        """Verify that the layers of staged slices are the stage's own in that wave."""
        layers = self._layers[staged.shard]
        strange = next((index for index in staged.indices if index >= len(layers)), None)
        if strange is None and bounds is not None:
            first, last = bounds[staged.stage : staged.stage + 2]
            strange = next((index for index in staged.indices if not first <= layers[index] < last), None)
        if strange is not None:
            message = (
                f"stage {staged.stage} of virtual worker {staged.vw} stages slice {strange} of shard {staged.shard} in "
                f"wave {staged.wave}, whose layer it does not have there"
            )
            self._findings.add(Kind.SLICE_NOT_OWNED, message, staged.origin)

    def _verify_trained(self, staged: Staged) -> None:
        """Verify that no slice of a frozen or of an inactive layer is staged."""
        layers, idle = self._layers[staged.shard], self._timeline.idle_at(staged.wave)
        strange = next((index for index in staged.indices if index < len(layers) and layers[index] in idle), None)
        if strange is not None:
            is_frozen = layers[strange] < self._timeline.frozen_at(staged.wave)[1]
            message = (
                f"stage {staged.stage} of virtual worker {staged.vw} stages slice {strange} of shard {staged.shard} in "
                f"wave {staged.wave}, where its layer {layers[strange]} is {'frozen' if is_frozen else 'inactive'}"
            )
            self._findings.add(Kind.FROZEN_TRAINED if is_frozen else Kind.INACTIVE_STAGED, message, staged.origin)

    def _slices(self, bounds: tuple[int, ...], idle: frozenset[int] = frozenset()) -> Counter[tuple[int, int]]:
        if (bounds, idle) not in self._num_slices:
            self._num_slices[bounds, idle] = self._layout.num_slices(bounds, idle)
        return self._num_slices[bounds, idle]

    def _verify_applies(self, commit: Commit) -> None:
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

    def _verify_staged(self, commit: Commit) -> None:
        staged = self._staged.get((commit.vw, commit.incarnation, commit.wave), Counter())
        life = self._timeline.lives.get((commit.vw, commit.incarnation))
        bounds = None if life is None else life.bounds_at(commit.wave)
        idle = self._timeline.idle_at(commit.wave)
        for shard in range(self._layout.num_shards):
            if bounds is None:
                whole = sum(count for (_, place), count in staged.items() if place == shard)
                wanted = sum(layer not in idle for layer in self._layers[shard])
                self._verify_part(commit, whole, wanted, f"are staged on shard {shard}")
                continue
            for stage in range(len(bounds) - 1):
                wanted = self._slices(bounds, idle)[stage, shard]
                where = f"of stage {stage} are staged on shard {shard}"
                self._verify_part(commit, staged[stage, shard], wanted, where)

    def _verify_part(self, commit: Commit, found: int, wanted: int, where: str) -> None:
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
