"""Content of a comparison's output, shared by terminal, page and JSON. Pure: runs in, summaries and texts out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetpipe.comparison.record import TrialRecord, TrialState
from hetpipe.comparison.statistics import Spread, spread_of
from hetpipe.comparison.trials import label_of
from hetpipe.job.file import Job
from hetpipe.report.text import LOSS, count, loss_first, measure, rate
from hetpipe.runs.result import TrainResult
from hetpipe.values.ids import VirtualWorkerIndex
from hetpipe.values.policies import WeightPolicy
from hetpipe.values.quantities import bytes_text, significant
from hetpipe.values.suggest import join_names
from hetpipe.values.wire import plain

_MINIBATCH = re.compile(r"minibatch(?:es)? (\d+)")


@dataclass(frozen=True, slots=True)
class StagePeaks:
    """Peak memory of one stage, the maximum over all virtual workers and seeds."""

    stage: int
    weight_bytes: int
    activation_bytes: int


@dataclass(frozen=True, slots=True)
class PolicySummary:
    """One policy, with one combination of values, over its seeds; all figures are of finished runs."""

    weights: WeightPolicy
    values: str
    """Of the keys that vary, as `sync.D=4, optimizer.lr=0.1`; empty if none do."""
    finished: int
    diverged: int
    failed: int
    final: dict[str, Spread]
    """Of the last evaluation, by name."""
    best: dict[str, Spread]
    """Of each run's evaluation with the least loss."""
    training_loss: Spread | None
    """Mean of the last wave."""
    samples_per_second: Spread | None
    wall_seconds: Spread | None
    wave_seconds: Spread | None
    """Of one wave of one virtual worker, on average over the run."""
    stages: tuple[StagePeaks, ...]

    @property
    def label(self) -> str:
        """Its row of the comparison."""
        return label_of(self.weights, self.values)


@dataclass(frozen=True, slots=True)
class Row:
    """Table row: cells, and whether each is the best of its column."""

    cells: tuple[str, ...]
    best: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Table:
    """Table with one row per policy and combination of values."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class ComparisonView:
    """A comparison, ready for output."""

    title: str
    subtitle: str
    tables: tuple[Table, ...]
    remarks: tuple[str, ...]
    """Remarks beside the tables: the significance given the seeds, and diverged or failed trials."""


def summaries_of(labels: Sequence[str], records: Sequence[TrialRecord]) -> tuple[PolicySummary, ...]:
    """One summary per row that has runs, in the order of `labels`."""
    runs = {label: [one for one in records if one.label == label] for label in labels}
    return tuple(_summary(found) for found in runs.values() if found)


def _summary(records: Sequence[TrialRecord]) -> PolicySummary:
    finished = [one for one in records if one.state is TrialState.FINISHED and one.result is not None]
    results = [one.result for one in finished if one.result is not None]
    return PolicySummary(
        weights=records[0].weights,
        values=records[0].values,
        finished=len(finished),
        diverged=sum(one.state is TrialState.DIVERGED for one in records),
        failed=sum(one.state is TrialState.FAILED for one in records),
        final=_by_name(one.evaluations[-1].values for one in finished if one.evaluations),
        best=_by_name(best for one in finished if (best := _best(one))),
        training_loss=spread_of(result.loss.last for result in results),
        samples_per_second=spread_of(result.samples_per_second for result in results),
        wall_seconds=spread_of(result.wall_seconds for result in results),
        wave_seconds=spread_of(_wave_seconds(result) for result in results),
        stages=_peaks(results),
    )


def _by_name(values: Iterable[dict[str, float]]) -> dict[str, Spread]:
    found = list(values)
    names = dict.fromkeys(name for one in found for name in one)
    spreads = {name: spread_of(one.get(name) for one in found) for name in loss_first(names)}
    return {name: spread for name, spread in spreads.items() if spread is not None}


def _best(record: TrialRecord) -> dict[str, float]:
    with_loss = [point.values for point in record.evaluations if LOSS in point.values]
    return min(with_loss, key=lambda values: values[LOSS], default={})


def _wave_seconds(result: TrainResult) -> float | None:
    return result.wall_seconds * len(result.clocks) / result.waves if result.waves else None


def _peaks(results: Sequence[TrainResult]) -> tuple[StagePeaks, ...]:
    stages = [stage for result in results for stage in result.stages]
    places = sorted({stage.stage for stage in stages})
    return tuple(
        StagePeaks(
            place,
            max(stage.weight_bytes for stage in stages if stage.stage == place),
            max(stage.activation_bytes for stage in stages if stage.stage == place),
        )
        for place in places
    )


def comparison_json(
    folder: Path, seeds: Sequence[int], summaries: Sequence[PolicySummary], records: Sequence[TrialRecord]
) -> dict[str, Any]:
    """JSON object of `compare --json`.

    Args:
        folder: of the comparison.
        seeds: the requested seeds.
        summaries: of `summaries_of`.
        records: the runs in them.
    """
    return {
        "run_dir": str(folder),
        "seeds": list(seeds),
        "policies": [plain(PolicySummary, one) for one in summaries],
        "runs": [
            {
                "weights": one.weights,
                "values": one.values,
                "seed": one.seed,
                "state": one.state,
                "sentence": one.sentence,
                "run_dir": str(folder / one.run_dir),
            }
            for one in records
        ],
    }


def spread_text(spread: Spread | None, number: Callable[[float], str] = measure) -> str:
    """`0.0831 ± 0.0102`.

    >>> spread_text(Spread(0.0831, 0.01021, 0.07, 0.1)), spread_text(Spread(0.5, None, 0.5, 0.5)), spread_text(None)
    ('0.0831 ± 0.0102', '0.5000', '-')
    """
    if spread is None:
        return "-"
    return number(spread.mean) if spread.deviation is None else f"{number(spread.mean)} ± {number(spread.deviation)}"


@dataclass(frozen=True, slots=True)
class _Column:
    """Column of the table."""

    heading: str
    text: Callable[[PolicySummary], str]
    value: Callable[[PolicySummary], float | None] = lambda _: None
    """The compared values; None without any."""
    best: Callable[[Iterable[float]], float] = min


def view_of(
    job: Job, num_seeds: int, summaries: Sequence[PolicySummary], records: Sequence[TrialRecord]
) -> ComparisonView:
    """Build the view of a comparison.

    Args:
        job: of any run; jobs differ in policy, the values that vary, seed, and per-policy overrides.
        num_seeds: number of requested seeds.
        summaries: of `summaries_of`.
        records: the runs in them.
    """
    rows = ("variant", "variants") if any(one.values for one in summaries) else ("weight policy", "weight policies")
    return ComparisonView(
        title=f"{job.name}: {count(len(summaries), *rows)}, {count(num_seeds, 'seed')}",
        subtitle=_setting(job),
        tables=(
            _table("How well it trains", _quality_columns(summaries), summaries),
            _table("How fast it is", _speed_columns(), summaries),
            _table(
                "Weight copies, the most at once", _byte_columns(lambda one: one.weight_bytes, summaries), summaries
            ),
            _table(
                "Activations kept for backwards, the most at once",
                _byte_columns(lambda one: one.activation_bytes, summaries),
                summaries,
            ),
        ),
        remarks=(*_findings(summaries), *_endings(records)),
    )


def _table(title: str, columns: Iterable[_Column], summaries: Sequence[PolicySummary]) -> Table:
    heading = "variant" if any(one.values for one in summaries) else "weights"
    shown = [_Column(heading, lambda one: one.label), *columns]
    return Table(title, tuple(column.heading for column in shown), tuple(_rows(shown, summaries)))


def _quality_columns(summaries: Sequence[PolicySummary]) -> Iterator[_Column]:
    yield _Column("finished", lambda one: f"{one.finished} of {one.finished + one.diverged + one.failed}")
    for name in loss_first({name for one in summaries for name in one.final}):
        yield from _evaluation_columns(name)
    yield _Column("training loss", lambda one: spread_text(one.training_loss), lambda one: _mean(one.training_loss))


def _evaluation_columns(name: str) -> Iterator[_Column]:
    """Columns of the last and the best evaluation. Lower loss is better; the direction of a metric is unknown."""
    of_loss = name == LOSS
    yield _Column(
        name,
        lambda one: spread_text(one.final.get(name)),
        lambda one: _mean(one.final.get(name)) if of_loss else None,
    )
    yield _Column(
        "best loss" if of_loss else f"{name} at best loss",
        lambda one: spread_text(one.best.get(name)),
        lambda one: _mean(one.best.get(name)) if of_loss else None,
    )


def _speed_columns() -> Iterator[_Column]:
    yield _Column(
        "samples/s",
        lambda one: spread_text(one.samples_per_second, rate),
        lambda one: _mean(one.samples_per_second),
        best=max,
    )
    yield _Column(
        "ms/wave",
        lambda one: spread_text(one.wave_seconds, lambda seconds: significant(1000 * seconds)),
        lambda one: _mean(one.wave_seconds),
    )


def _byte_columns(of_stage: Callable[[StagePeaks], int], summaries: Sequence[PolicySummary]) -> Iterator[_Column]:
    """One column per stage, and one for their sum."""
    for place in sorted({stage.stage for one in summaries for stage in one.stages}):
        yield _stage_column(of_stage, place)
    yield _Column(
        "all stages",
        lambda one: _bytes_text(map(of_stage, one.stages)),
        lambda one: sum(map(of_stage, one.stages)) if one.stages else None,
    )


def _stage_column(of_stage: Callable[[StagePeaks], int], place: int) -> _Column:
    return _Column(
        f"stage {place}", lambda one: _bytes_text(of_stage(stage) for stage in one.stages if stage.stage == place)
    )


def _bytes_text(parts: Iterable[int]) -> str:
    known = list(parts)
    return bytes_text(sum(known)) if known else "-"


def _rows(columns: Sequence[_Column], summaries: Sequence[PolicySummary]) -> Iterator[Row]:
    bests: list[float | None] = []
    for column in columns:
        known = [value for one in summaries if (value := column.value(one)) is not None]
        bests.append(column.best(known) if len(known) > 1 and min(known) != max(known) else None)
    for one in summaries:
        cells = tuple(column.text(one) for column in columns)
        yield Row(
            cells,
            frozenset(
                index
                for index, (column, best) in enumerate(zip(columns, bests, strict=True))
                if best is not None and column.value(one) == best
            ),
        )


def _mean(spread: Spread | None) -> float | None:
    return None if spread is None else spread.mean


def _setting(job: Job) -> str:
    workers = "planned virtual workers"
    if job.is_planned:
        stages = max(job.num_stages(VirtualWorkerIndex(vw)) for vw in range(job.num_workers))
        workers = f"{count(job.num_workers, 'virtual worker')} of {count(stages, 'stage')}"
    minibatches = count(job.minibatches or 0, "minibatch", "minibatches")
    length = minibatches if job.epochs is None else count(job.epochs, "epoch")
    given = job.minibatches_per_wave
    waves = str(given) if isinstance(given, int) else join_names(map(str, given), "and")
    arguments = ", ".join(f"{name} {value}" for name, value in job.optimizer.arguments.items())
    return (
        f"{workers}, {waves} minibatches of {count(job.batch_size, 'sample')} per "
        f"wave, {job.optimizer.name} ({arguments}), {length}, sync {job.sync.kind}"
    )


def _findings(summaries: Sequence[PolicySummary]) -> Iterator[str]:
    ranked = sorted(
        ((spread.mean, spread, one) for one in summaries if (spread := one.final.get(LOSS)) is not None),
        key=lambda entry: entry[0],
    )
    if len(ranked) > 1:
        (_, first, best), (_, second, next_best) = ranked[:2]
        yield (
            f"Least loss at the end: {best.label} with {spread_text(first)}, then {next_best.label} with "
            f"{spread_text(second)}; {_clearness(first, second)}."
        )
    rates = sorted(
        ((spread.mean, one.label) for one in summaries if (spread := one.samples_per_second) is not None),
        reverse=True,
    )
    if len(rates) > 1:
        (most, fastest), (least, slowest) = rates[0], rates[-1]
        yield (
            f"Fastest: {fastest} with {rate(most)} samples/s; slowest: {slowest} with {rate(least)}, "
            f"{most / least:.2f} times slower."
        )


def _clearness(first: Spread, second: Spread) -> str:
    """Sentence on whether the seeds separate two policies."""
    if first.deviation is None or second.deviation is None:
        return "one seed says nothing of the spread, so take more"
    if second.least > first.most:
        return "every seed of the first is below every seed of the second"
    return "the seeds of the two overlap"


def _endings(records: Sequence[TrialRecord]) -> Iterator[str]:
    for one in records:
        if one.state is TrialState.DIVERGED:
            place = _MINIBATCH.search(one.sentence)
            where = f" at minibatch {place[1]}" if place else ""
            yield f"{one.label}, seed {one.seed} diverged{where}: {one.sentence}"
        elif one.state is TrialState.FAILED:
            yield f"{one.label}, seed {one.seed} failed: {one.sentence}"
