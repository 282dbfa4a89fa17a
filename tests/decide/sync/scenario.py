"""What a state-machine run is about: the numbers of a job, and the model's slices on the shards."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from hetpipe.decide.sync.decision_log import LogConfig
from hetpipe.decide.sync.division import empty_bitmap, with_used
from hetpipe.errors import HetpipeError, SliceMismatch, StaleIncarnation, StaleTerm
from hetpipe.values.ids import (
    Clock,
    Incarnation,
    JobId,
    LayerIndex,
    ShardIndex,
    StageIndex,
    Term,
    VirtualWorkerIndex,
    Wave,
)
from hetpipe.values.plan import SlicePlan, TensorSpec
from hetpipe.values.policies import PullTiming, WeightPolicy
from hetpipe.values.requests import PushHeader, Requester, SliceHeader
from hetpipe.values.sync import DataSpec, Membership, PlanVersion, Progress, SyncSpec

JOB = JobId("job")
TERM = Term(3)
LIFE = Incarnation(0)

#: Layers of the model; each has one parameter of `ELEMENTS` elements. Where there are two shards, the first is cut.
NUM_LAYERS = 3
ELEMENTS = 6

#: One of each kind of gate; the others choose their clocks as `wave` does.
POLICIES: tuple[WeightPolicy, ...] = ("wave", "flush", "double_buffer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One job. N, D and V are those of `wsp.md`."""

    num_stages: tuple[int, ...]
    """K of each virtual worker."""
    num_shards: int
    n: int
    d: int | None
    weights: WeightPolicy = "wave"
    deterministic: bool
    num_samples: int
    batch_size: int
    epochs: int | None
    total_minibatches: int | None
    pull: PullTiming = "every_wave"
    every: int | None
    """A checkpoint at every multiple of this clock."""
    start: int = 0
    """The clock of the checkpoint that the run begins from."""
    used: tuple[int, ...] = ()
    """Samples of the epoch that were used before it."""
    has_cuts: bool = False
    """Whether the log knows which layers the stages have, so that these may move."""

    @property
    def data(self) -> DataSpec:
        """What is dealt."""
        return DataSpec(self.num_samples, self.batch_size, 7, self.epochs, self.total_minibatches)

    @property
    def progress(self) -> Progress:
        """Where the run begins."""
        used = with_used(empty_bitmap(self.num_samples), self.used)
        return Progress(Clock(self.start), 0, used, len(self.used), len(self.used))

    @property
    def members(self) -> tuple[VirtualWorkerIndex, ...]:
        """Every virtual worker."""
        return tuple(VirtualWorkerIndex(vw) for vw in range(len(self.num_stages)))

    @property
    def sync(self) -> SyncSpec:
        """The rule of its gate."""
        return SyncSpec(self.n, self.d, "sum", self.deterministic, self.weights, self.pull)

    def log_config(self) -> LogConfig:
        """For the decision log."""
        return LogConfig(
            term=TERM,
            num_shards=self.num_shards,
            membership=Membership(
                {VirtualWorkerIndex(vw): count for vw, count in enumerate(self.num_stages)},
                plans={vw: PlanVersion.following(None, self.cut(vw)) for vw in self.members if self.has_cuts},
            ),
            sync=self.sync,
            data=self.data,
            checkpoint_every_waves=self.every,
            progress=self.progress,
        )

    def cut(self, vw: int) -> tuple[int, ...]:
        """The bounds of the stages of a virtual worker, as planned; empty: not known to the log."""
        return (*range(self.num_stages[vw]), NUM_LAYERS) if self.has_cuts else ()

    def slices(self) -> tuple[SlicePlan, ...]:
        """All slices; a third shard holds none."""
        cut = ELEMENTS // 2
        found: list[SlicePlan] = []
        for layer in range(NUM_LAYERS):
            parameter = TensorSpec(f"{layer}.weight", (ELEMENTS,), "float32")
            pieces = [(0, 0, cut), (1, cut, ELEMENTS)] if layer == 0 and self.num_shards > 1 else [(layer, 0, ELEMENTS)]
            for shard, begin, end in pieces:
                index = ShardIndex(shard % min(2, self.num_shards))
                found.append(SlicePlan(parameter, LayerIndex(layer), index, begin, end))
        return tuple(found)

    def slices_of_shard(self, shard: int) -> tuple[SlicePlan, ...]:
        """What one shard holds."""
        return tuple(s for s in self.slices() if s.shard == shard)

    def slices_of_stage(self, vw: int, stage: int, shard: int) -> tuple[SlicePlan, ...]:
        """What a stage holds of one shard: layer l belongs to stage l, the last stage takes the rest."""
        last = self.num_stages[vw] - 1
        return tuple(s for s in self.slices_of_shard(shard) if min(s.layer, last) == stage)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Small jobs of every kind."""
    staleness = draw(st.sampled_from([0, 1, 2, 4, None]))
    by_epochs = draw(st.booleans())
    num_samples = draw(st.integers(1, 20) | st.integers(20, 50))
    used = draw(st.sets(st.integers(0, num_samples - 1), max_size=num_samples - 1)) if draw(st.booleans()) else set()
    return Scenario(
        num_stages=tuple(draw(st.integers(1, NUM_LAYERS)) for _ in range(draw(st.sampled_from([1, 2, 2, 3, 3])))),
        num_shards=draw(st.integers(1, 3)),
        n=draw(st.integers(1, 4)),
        d=staleness,
        weights=draw(st.sampled_from(POLICIES)),
        deterministic=staleness is not None and draw(st.booleans()),
        num_samples=num_samples,
        batch_size=draw(st.sampled_from([1, 1, 2, 3])),
        epochs=draw(st.integers(1, 2)) if by_epochs else None,
        total_minibatches=None if by_epochs else len(used) + draw(st.integers(1, 60)),
        pull="every_wave" if staleness is None else draw(st.sampled_from(["every_wave", "every_wave", "required"])),
        every=draw(st.sampled_from([None, None, None, 1, 2, 3])),
        start=draw(st.sampled_from([0, 3])) if used else 0,
        used=tuple(sorted(used)),
    )


def requester(vw: int, stage: int, incarnation: Incarnation = LIFE) -> Requester:
    """How a well-behaved stage names itself."""
    return Requester(JOB, TERM, VirtualWorkerIndex(vw), incarnation, StageIndex(stage))


def slice_header(piece: SlicePlan) -> SliceHeader:
    """A slice as a stage names it."""
    return SliceHeader(piece.parameter.name, piece.start, piece.stop, piece.parameter.dtype)


def push_header(
    scenario: Scenario, vw: int, stage: int, shard: int, wave: int | None, incarnation: Incarnation = LIFE
) -> PushHeader:
    """A push of everything the stage holds of the shard."""
    slices = tuple(slice_header(s) for s in scenario.slices_of_stage(vw, stage, shard))
    return PushHeader(requester(vw, stage, incarnation), None if wave is None else Wave(wave), slices)


def wrong_headers(header: PushHeader) -> dict[str, PushHeader]:
    """One header per way of being wrong that has nothing to do with waves."""
    who = header.requester
    first, *rest = header.slices
    return {
        "job": replace(header, requester=replace(who, job_id=JobId("other"))),
        "older term": replace(header, requester=replace(who, term=Term(TERM - 1))),
        "later term": replace(header, requester=replace(who, term=Term(TERM + 1))),
        "incarnation": replace(header, requester=replace(who, incarnation=Incarnation(who.incarnation + 1))),
        "stranger": replace(header, requester=replace(who, vw=VirtualWorkerIndex(77))),
        "name": replace(header, slices=(replace(first, parameter="nobody"), *rest)),
        "bounds": replace(header, slices=(replace(first, stop=first.stop + 1), *rest)),
        "negative bounds": replace(header, slices=(replace(first, start=-1), *rest)),
        "dtype": replace(header, slices=(replace(first, dtype="float64"), *rest)),
        "twice": replace(header, slices=(first, first, *rest)),
    }


#: Which error each header of `wrong_headers` must meet.
REFUSALS: dict[str, type[HetpipeError]] = {
    "job": StaleTerm,
    "older term": StaleTerm,
    "later term": StaleTerm,
    "incarnation": StaleIncarnation,
    "stranger": StaleIncarnation,
    "name": SliceMismatch,
    "bounds": SliceMismatch,
    "negative bounds": SliceMismatch,
    "dtype": SliceMismatch,
    "twice": SliceMismatch,
}
