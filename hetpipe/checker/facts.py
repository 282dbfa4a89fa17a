"""Specification of a run: the parts of job.json, plan.json and facts.json that its history is verified against."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from fractions import Fraction
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, ValidationError

from hetpipe.checker.rules import HistoryRule, OrderRule, PullRule, RunRule, SyncRule, WeightRule
from hetpipe.errors import UserError

FileModel = TypeVar("FileModel", bound=BaseModel)
Word = TypeVar("Word", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Layout:
    """Virtual workers, stages and shards of a run, by the plan that it begins with."""

    bounds: tuple[tuple[int, ...], ...]
    """Per virtual worker that founds the run, in index order: stage k has the layers [bounds[k], bounds[k + 1])."""
    num_shards: int
    slices: tuple[tuple[int, int], ...]
    """(layer, shard) of every slice; none where no shard holds weights."""
    freeze_levels: tuple[int, ...] = ()
    """F → leading layers that are frozen then, as far as ties allow; empty where none freeze."""
    devices: tuple[tuple[str, ...], ...] = ()
    """Per virtual worker, the device of each stage; empty: not known."""
    num_added: int = 0
    """The last so many virtual workers are added by the script, and do not count for the end of the run."""

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.bounds[0][-1]

    def stages_of(self, vw: int) -> int:
        """Number of stages of `vw` in the plan; 0 if it has none."""
        return len(self.bounds[vw]) - 1 if vw < len(self.bounds) else 0

    def layers_on(self, shard: int) -> tuple[int, ...]:
        """The layer of each slice on a shard, in its order."""
        return tuple(layer for layer, place in self.slices if place == shard)

    def num_slices(self, bounds: tuple[int, ...], idle: Collection[int] = ()) -> Counter[tuple[int, int]]:
        """(stage, shard) → slices of that stage with this cut on that shard, of layers that are not `idle`."""
        found: Counter[tuple[int, int]] = Counter()
        for layer, shard in (piece for piece in self.slices if piece[0] not in idle):
            found[bisect_right(bounds, layer) - 1, shard] += 1
        return found


@dataclass(frozen=True, slots=True)
class Data:
    """Training data, and the end of the run."""

    num_samples: int
    batch_size: int
    epochs: int | None = None
    """Passes over the data, or None where `minibatches` bounds the run."""
    minibatches: int | None = None
    """Minibatches per virtual worker, or None where `epochs` bounds the run."""


@dataclass(frozen=True, slots=True)
class Start:
    """Initial clocks of the run: all zeros when fresh, else the barrier it was resumed from."""

    clock: int = 0
    epoch: int = 0
    used: frozenset[int] = frozenset()
    """Samples of `epoch` that earlier waves used."""
    minibatches: int = 0
    """Minibatches committed before."""
    waves: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """vw → N_v, and its last minibatch before; empty where N has never changed."""
    frozen: int = 0
    """F."""
    lineup: int = 0
    """F of those who train."""
    inactive: tuple[int, ...] = ()
    """Layers that are inactive from there on."""
    fresh: tuple[int, ...] = ()
    """Layers that are built anew there."""


@dataclass(frozen=True, slots=True)
class ActivationLine:
    """What the job says about active layers from a barrier on."""

    clock: int
    inactive: tuple[int, ...]
    fresh: tuple[int, ...] = ()
    """Layers that are built anew there."""


@dataclass(frozen=True, slots=True)
class FreezeRule:
    """The frozen layers that a job decides, counted as F, before ties lower it."""

    at_start: int = 0
    at_epochs: tuple[tuple[int, int], ...] = ()
    """(completed epochs, F)."""
    at_clocks: tuple[tuple[int, int], ...] = ()
    """(clock of a barrier, F)."""
    alpha: Fraction | None = None
    """Where norms decide: the part of the trained layers that may freeze at once."""
    every_waves: int | None = None
    """They decide at its multiples; None: at the ends of epochs."""

    def decided(self, before: int, num_trained: int, totals: Mapping[int, float], frozen_layers: int) -> int:
        """F by the norms: at most ⌊F + α(L − F)⌋, and at most the first trained layer with the least norm.

        Args:
            before: F before.
            num_trained: L.
            totals: layer → squared norm, over all virtual workers.
            frozen_layers: leading layers that are frozen before.
        """
        layers = sorted(layer for layer in totals if layer >= frozen_layers)
        if self.alpha is None or before + len(layers) < num_trained:
            return before
        least = min(totals[layer] for layer in layers)
        first = next(number for number, layer in enumerate(layers) if totals[layer] == least)
        return max(before, min(int(before + self.alpha * (num_trained - before)), before + first))

    def due(self, clock: int, epoch: int) -> int:
        """F at the barrier at `clock`, where `epoch` passes over the data are completed."""
        early = [frozen for at, frozen in self.at_epochs if at <= epoch]
        return max([self.at_start, *early, *(frozen for at, frozen in self.at_clocks if at <= clock)])


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """A line of the job's script about the memory policies of layers of a virtual worker."""

    vw: int
    layers: frozenset[int]
    policy: str
    clock: int | None
    """The barrier from which on it is in effect; None: it has a minibatch."""
    p: int | None
    """The minibatch from which on it is in effect; None: it has a clock."""

    def is_due(self, p: int, wave: int) -> bool:
        """Whether it is in effect for minibatch `p`, of this wave."""
        return (self.clock is not None and self.clock <= wave) or (self.p is not None and self.p <= p)


@dataclass(frozen=True, slots=True)
class MemberLine:
    """A line of the job's script that drops a virtual worker, or adds it again."""

    clock: int
    vw: int
    is_added: bool


@dataclass(frozen=True, slots=True)
class Lineup:
    """Who trains while so many layers are frozen, where pipelines are compressed."""

    frozen: int
    """The smallest F that it is for."""
    members: frozenset[int]
    minibatches_per_wave: int


@dataclass(frozen=True, slots=True)
class WaveChange:
    """A line of the job's script about N."""

    clock: int
    counts: tuple[int, ...]
    """One number for all virtual workers, or one for each."""

    def of(self, vw: int) -> int:
        """N_v from there on."""
        return self.counts[min(vw, len(self.counts) - 1)]


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything a history is verified against."""

    rule: RunRule
    layout: Layout
    data: Data
    start: Start = field(default_factory=Start)
    history: HistoryRule = HistoryRule.FULL
    waves: tuple[int, ...] = ()
    """N_v of each virtual worker that founds the run; empty: that of `rule`, the same for all."""
    freezing: FreezeRule = FreezeRule()
    memory: tuple[MemoryLine, ...] = ()
    """What the job's script says about memory policies, in order of time."""
    wave_changes: tuple[WaveChange, ...] = ()
    """What the job's script says about N above the clock of the start, in order."""
    members: tuple[MemberLine, ...] = ()
    """What the job's script says about who trains, in order."""
    lineups: tuple[Lineup, ...] = ()
    """Who trains with which F, in order of F; empty: all the time the same."""
    activations: tuple[ActivationLine, ...] = ()
    """Which layers are inactive and built anew, as the job says, in order; clock 0 is the start of the job."""

    def inactive_due(self, clock: int) -> tuple[int, ...]:
        """The layers that are inactive from the barrier at `clock` on."""
        start = self.start.clock
        due = [line.inactive for line in self.activations if start < line.clock <= clock or line.clock == start == 0]
        return due[-1] if due else self.start.inactive

    def fresh_due(self, clock: int) -> tuple[int, ...]:
        """The layers that are built anew at the barrier at `clock`, by a line of the job or by the checkpoint."""
        if clock == self.start.clock:
            return self.start.fresh
        return next((line.fresh for line in self.activations if line.clock == clock > self.start.clock), ())


_Count = Annotated[int, Field(ge=1)]

#: The default schedule. Its meaning is the same for every policy.
_AUTO = "auto"


class _SyncFile(BaseModel):
    kind: str
    D: int | None = Field(default=None, ge=0)
    minibatches_per_wave: (
        Annotated[int, Field(ge=1)] | Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    )
    deterministic: bool = False
    pull: str = PullRule.EVERY_WAVE.value


class _GradientsFile(BaseModel):
    accumulate: int = Field(default=1, ge=1)


class _FreezePointFile(BaseModel):
    epoch: int
    layers: int


class _FreezeFile(BaseModel):
    layers: int = 0
    schedule: list[_FreezePointFile] = []
    alpha: Annotated[str, Field(pattern=r"^[0-9./eE+-]+$")] | None = None
    waves: _Count | None = None


class _MomentFile(BaseModel):
    clock: int | None = None
    p: int | None = None


class _LineFile(BaseModel):
    at: _MomentFile
    do: str
    vw: int = 0
    layers: int | list[int | str] = []
    policy: str = ""
    minibatches_per_wave: _Count | list[_Count] = []
    devices: list[int] | None = None
    active: list[int | str] = []
    fresh: list[int | str] | None = None


class _ElasticFile(BaseModel):
    script: list[_LineFile] = []
    active: list[int | str] | None = None
    keep_global_batch: bool = False


class _JobFile(BaseModel):
    sync: _SyncFile
    freeze: _FreezeFile = _FreezeFile()
    weights: str = WeightRule.WAVE.value
    schedule: str = _AUTO
    history: str = HistoryRule.FULL.value
    gradients: _GradientsFile = _GradientsFile()
    elastic: _ElasticFile = _ElasticFile()
    batch_size: int = Field(ge=1)
    epochs: int | None = None
    minibatches: int | None = None


class _StageFile(BaseModel):
    first_layer: int
    last_layer: int
    agent: str = ""
    device: str = ""


class _VirtualWorkerFile(BaseModel):
    stages: list[_StageFile] = Field(min_length=1)
    minibatches_per_wave: _Count | None = None


class _SliceFile(BaseModel):
    layer: int
    shard: int


class _LineupWorkerFile(BaseModel):
    vw: int


class _LineupFile(BaseModel):
    frozen: int
    workers: list[_LineupWorkerFile] = Field(min_length=1)
    minibatches_per_wave: _Count


class _PlanFile(BaseModel):
    virtual_workers: list[_VirtualWorkerFile] = Field(min_length=1)
    slices: list[_SliceFile]
    num_shards: int = Field(ge=1)
    freeze_levels: list[int] = []
    freeze_lineups: list[_LineupFile] = []


class _StartFile(BaseModel):
    clock: int = Field(default=0, ge=0)
    epoch: int = Field(default=0, ge=0)
    used: list[int] = []
    minibatches: int = Field(default=0, ge=0)
    waves: dict[int, tuple[_Count, int]] = {}
    frozen: int = Field(default=0, ge=0)
    lineup: int = Field(default=0, ge=0)
    inactive: list[int] = []
    fresh: list[int] = []


class _FactsFile(BaseModel):
    num_samples: int = Field(ge=1)
    start: _StartFile = _StartFile()
    layers: list[str] = []
    """The layers' names; none in runs of earlier versions."""


def read_facts(run_dir: Path) -> Facts:
    """Read the facts of the run in `run_dir`.

    Raises:
        UserError: a file is missing or malformed, or names a policy, a schedule or a kind of synchronization that
            is unknown to the checker.
    """
    job = _read(run_dir / "job.json", _JobFile)
    plan = _read(run_dir / "plan.json", _PlanFile)
    facts = _read(run_dir / "facts.json", _FactsFile)
    return Facts(
        rule=_rule(job),
        layout=_layout(plan, job),
        data=Data(facts.num_samples, job.batch_size, job.epochs, job.minibatches),
        start=_start(facts.start),
        history=_known(HistoryRule, "history", job.history),
        waves=_waves(job, plan),
        freezing=_freezing(job),
        memory=tuple(_memory(job, facts)),
        wave_changes=tuple(change for change in _wave_changes(job, plan) if change.clock > facts.start.clock),
        members=tuple(
            MemberLine(line.at.clock, line.vw, line.do == "add")
            for line in job.elastic.script
            if line.do in ("drop", "add") and line.at.clock is not None
        ),
        lineups=tuple(
            Lineup(each.frozen, frozenset(worker.vw for worker in each.workers), each.minibatches_per_wave)
            for each in plan.freeze_lineups
        ),
        activations=tuple(_activations(job, facts)),
    )


def _freezing(job: _JobFile) -> FreezeRule:
    lines = ((line.at.clock, line.layers) for line in job.elastic.script if line.do == "freeze")
    return FreezeRule(
        job.freeze.layers,
        tuple((point.epoch, point.layers) for point in job.freeze.schedule),
        tuple((clock, layers) for clock, layers in lines if clock is not None and isinstance(layers, int)),
        None if job.freeze.alpha is None else Fraction(job.freeze.alpha),
        job.freeze.waves,
    )


def _start(start: _StartFile) -> Start:
    return Start(
        start.clock,
        start.epoch,
        frozenset(start.used),
        start.minibatches,
        start.waves,
        start.frozen,
        start.lineup,
        tuple(start.inactive),
        tuple(start.fresh),
    )


def _meant(entries: Iterable[int | str], facts: _FactsFile) -> frozenset[int]:
    """The layers that indices and patterns of names mean."""
    given = list(entries)
    patterns = [each for each in given if isinstance(each, str)]
    named = (index for index, name in enumerate(facts.layers) if any(fnmatchcase(name, each) for each in patterns))
    return frozenset((*named, *(each for each in given if isinstance(each, int))))


def _activations(job: _JobFile, facts: _FactsFile) -> Iterator[ActivationLine]:
    lines = [(line.at.clock, line.active, line.fresh) for line in job.elastic.script if line.do == "activate"]
    for clock, active, fresh in [(0, job.elastic.active, ()), *lines]:
        if clock is not None and active is not None:
            inactive = set(range(len(facts.layers))) - _meant(active, facts)
            yield ActivationLine(clock, tuple(sorted(inactive)), tuple(sorted(_meant(fresh or (), facts))))


def _memory(job: _JobFile, facts: _FactsFile) -> Iterator[MemoryLine]:
    for line in job.elastic.script:
        if line.do == "memory" and isinstance(line.layers, list):
            yield MemoryLine(line.vw, _meant(line.layers, facts), line.policy, line.at.clock, line.at.p)


def _wave_changes(job: _JobFile, plan: _PlanFile) -> Iterator[WaveChange]:
    """The lines about N; with `keep_global_batch` also what lines about members make of it."""
    at_clocks = [(line.at.clock, line) for line in job.elastic.script if line.at.clock is not None]
    stated = {
        clock: WaveChange(clock, (given,) if isinstance(given := line.minibatches_per_wave, int) else tuple(given))
        for clock, line in at_clocks
        if line.do == "waves" and line.minibatches_per_wave
    }
    lines = [(clock, line.vw, line.do == "add") for clock, line in at_clocks if line.do in ("drop", "add")]
    if not job.elastic.keep_global_batch:
        yield from stated.values()
        return
    everybody = range(len(plan.virtual_workers))
    own = list(_waves(job, plan)) or [_rule(job).minibatches_per_wave for _ in everybody]
    present = {vw for vw in everybody if next((is_added for _, of, is_added in lines if of == vw), False) is False}
    total = sum(own[vw] for vw in present)
    for clock in sorted({*stated, *(at for at, _, _ in lines)}):
        for at, vw, is_added in lines:
            if at == clock:
                (present.add if is_added else present.discard)(vw)
        if clock in stated:
            own = [stated[clock].of(vw) for vw in everybody]
            total = sum(own[vw] for vw in present)
        yield WaveChange(clock, _dealt(job, own, present, total))


def _dealt(job: _JobFile, own: Sequence[int], present: Collection[int], total: int) -> tuple[int, ...]:
    """N_v such that those who train have `total` minibatches together, in proportion to their own N_v, rounded down.

    What is left goes, one update at a time, to those that have lost most by rounding, the lower index first.
    """
    rule = _rule(job)
    size = 1 if rule.updates_per_wave else rule.accumulate
    exact = {vw: Fraction(total * own[vw], size * sum(own[each] for each in present)) for vw in present}
    dealt = {vw: int(share) for vw, share in exact.items()}
    while sum(dealt.values()) * size < total:
        most = max(present, key=lambda vw: (exact[vw] - dealt[vw], -vw))
        dealt[most] += 1
    return tuple(size * dealt[vw] if vw in dealt else n for vw, n in enumerate(own))


def _read(path: Path, kind: type[FileModel]) -> FileModel:
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; name the folder of a run") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "file"
        raise UserError(f"{path} is no {path.name} of a run: {place}: {first['msg']}") from error


def _waves(job: _JobFile, plan: _PlanFile) -> tuple[int, ...]:
    """N_v of each virtual worker of the plan, including those added in an earlier run."""
    given, workers = job.sync.minibatches_per_wave, plan.virtual_workers
    if isinstance(given, int):
        return ()
    found = [worker.minibatches_per_wave or num for worker, num in zip_longest(workers, given[: len(workers)])]
    if None in found or len(given) > len(workers):
        raise UserError(
            f"sync.minibatches_per_wave has {len(given)} numbers, but the plan has {len(workers)} virtual workers; "
            "give one for each"
        )
    return tuple(found)


def _rule(job: _JobFile) -> RunRule:
    sync, given = _known(SyncRule, "sync.kind", job.sync.kind), job.sync.minibatches_per_wave
    return RunRule(
        given if isinstance(given, int) else min(given),
        _staleness(sync, job.sync.D),
        _known(WeightRule, "weights", job.weights),
        job.sync.deterministic,
        OrderRule.ONE_F_ONE_B if job.schedule == _AUTO else _known(OrderRule, "schedule", job.schedule),
        sync,
        job.gradients.accumulate,
        pulls_when_required=_known(PullRule, "sync.pull", job.sync.pull) is PullRule.REQUIRED,
    )


def _known(words: type[Word], key: str, word: str) -> Word:
    try:
        return words(word)
    except ValueError as error:
        raise UserError(f"{key}: {word} cannot be checked, only {', '.join(words)}") from error


def _staleness(sync: SyncRule, bound: int | None) -> int | None:
    if sync is SyncRule.BSP:
        return 0
    if sync is not SyncRule.WSP:
        return None
    if bound is None:
        raise UserError("sync.kind wsp without a D cannot be checked; give `sync.D`, or use asp for no bound")
    return bound


def _layout(plan: _PlanFile, job: _JobFile) -> Layout:
    bounds = tuple(
        (worker.stages[0].first_layer, *(stage.last_layer for stage in worker.stages))
        for worker in plan.virtual_workers
    )
    return Layout(
        bounds,
        plan.num_shards,
        tuple((piece.layer, piece.shard) for piece in plan.slices),
        tuple(plan.freeze_levels),
        tuple(tuple(f"{stage.agent} {stage.device}" for stage in worker.stages) for worker in plan.virtual_workers),
        sum(line.do == "add" and line.devices is not None for line in job.elastic.script)
        + len({worker.vw for each in plan.freeze_lineups[1:] for worker in each.workers}),
    )
