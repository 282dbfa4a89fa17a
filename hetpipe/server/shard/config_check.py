"""Validation of a shard's configuration before use: an invalid plan causes an error reply instead of a crash.

Pure. Configurations of the coordinator always pass; this guards against other versions, and other clients that reach
the port.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise

from hetpipe.errors import ProtocolViolation, ResourceExhausted
from hetpipe.values.addresses import split_address
from hetpipe.values.bounds import (
    JOB_ID,
    MAX_COUNT,
    MAX_NAME_CHARACTERS,
    MAX_PATH_CHARACTERS,
    MAX_RANK,
    MAX_SHARDS,
    MAX_STAGES,
)
from hetpipe.values.freezing import FreezeLineup, Freezing
from hetpipe.values.ids import Incarnation, VirtualWorkerIndex
from hetpipe.values.plan import DTYPE_BYTES, SlicePlan
from hetpipe.values.quantities import bytes_text
from hetpipe.values.run_document import RunDocument
from hetpipe.values.shard_config import ShardConfig
from hetpipe.values.storage_url import checked_url
from hetpipe.values.sync import DataSpec, Membership, Progress, SyncSpec

_COMBINES = ("sum", "mean")

#: Limit of waiting for a disk: a day, as in a job file.
_MOST_SECONDS = 86_400.0


def check_config(config: ShardConfig, *, memory_bytes: int) -> None:
    """Reject a configuration that no shard could serve.

    Args:
        config: from the coordinator.
        memory_bytes: memory of the machine; one copy of the weights must fit.

    Raises:
        ProtocolViolation: a value is out of range; the message names it.
        ResourceExhausted: the slices are larger than the machine's memory.
        UserError: the clock shard's address is invalid.
    """
    wrong = next(_mistakes(config), None)
    if wrong is not None:
        raise ProtocolViolation(f"a shard cannot be configured with {wrong}")
    if config.shard:
        split_address(config.clock_shard_address)
    num_bytes = sum((piece.stop - piece.start) * DTYPE_BYTES[piece.parameter.dtype] for piece in config.slices)
    if num_bytes > memory_bytes:
        raise ResourceExhausted(
            f"shard {config.shard} of job {config.job_id} holds {bytes_text(num_bytes)} of weights, its machine has "
            f"{bytes_text(memory_bytes)} of memory; use more shards (parameter_servers.count)"
        )


def _mistakes(config: ShardConfig) -> Iterator[str]:
    if not JOB_ID.fullmatch(config.job_id):
        yield f"job id {config.job_id!r:.80}: letters, digits, dots, dashes and underscores, 128 at most"
    if not 0 <= config.term < MAX_COUNT:
        yield f"term {config.term}"
    if not 0 <= config.shard < config.num_shards <= MAX_SHARDS:
        yield f"shard {config.shard} of {config.num_shards}; there are at most {MAX_SHARDS}"
    yield from _mistakes_of_membership(config.membership)
    yield from _mistakes_of_changes(config)
    yield from _mistakes_of_activations(config)
    yield from _mistakes_of_freezing(config.freezing, config.progress, config.membership)
    if len(config.run_dir) > MAX_PATH_CHARACTERS or "\0" in config.run_dir:
        yield f"run folder {config.run_dir!r:.80}"
    if config.storage is not None:
        try:
            checked_url(config.storage)
        except ValueError as error:
            yield f"an unusable storage: {error}"
    every = config.checkpoint_every_waves
    if config.checkpoint_keep < 1 or (every is not None and not 1 <= every < MAX_COUNT):
        yield f"checkpoints every {every} waves of which {config.checkpoint_keep} are kept"
    if not 0 <= config.last_checkpoint_seconds <= _MOST_SECONDS:
        yield f"the last checkpoint tried again for {config.last_checkpoint_seconds} s; at most {_MOST_SECONDS}"
    yield from _mistakes_of_slices(config.slices)
    yield from _mistakes_of_sync(config.sync)
    yield from _mistakes_of_data(config.data)
    yield from _mistakes_of_progress(config.progress, config.data)
    if config.run is not None:
        yield from _mistakes_of_run(config, config.run)


def _mistakes_of_membership(membership: Membership) -> Iterator[str]:
    counts = membership.num_stages
    if not counts or min(counts) < 0 or min(counts.values()) < 1 or sum(counts.values()) > MAX_STAGES:
        yield f"{len(counts)} virtual workers of {sum(counts.values())} stages; there are at most {MAX_STAGES} stages"
    if max(counts, default=0) >= MAX_COUNT:
        yield f"virtual worker {max(counts)}"
    waves = membership.minibatches_per_wave
    if waves and (waves.keys() != counts.keys() or not 1 <= min(waves.values()) <= max(waves.values()) < MAX_COUNT):
        yield f"N = {str(waves)[:80]} of {len(counts)} virtual workers"
    for vw, plan in membership.plans.items():
        if plan.num_stages != counts.get(vw) or not _is_cut(plan.bounds) or not _is_cut(plan.planned):
            yield f"virtual worker {vw} of {counts.get(vw, 0)} stages cut at {plan.bounds!s:.80}"
        if not 0 <= plan.version < MAX_COUNT:
            yield f"version {plan.version} of the plan of virtual worker {vw}"


def _mistakes_of_changes(config: ShardConfig) -> Iterator[str]:
    for waves in config.wave_changes:
        given, num_workers = waves.minibatches_per_wave, len(config.membership.num_stages)
        if (
            not 1 <= waves.clock < MAX_COUNT
            or len(given) not in (1, num_workers)
            or not all(1 <= each < MAX_COUNT for each in given)
        ):
            yield f"a change of N at clock {waves.clock} to {given!s:.80} for {num_workers} virtual workers"
    for member in config.member_changes:
        if not 1 <= member.clock < MAX_COUNT or member.vw not in config.membership.num_stages:
            yield f"a change of members at clock {member.clock} of virtual worker {member.vw}"
    for change in config.plan_changes:
        known = config.membership.plans.get(change.vw)
        if not 1 <= change.clock < MAX_COUNT or not (change.bounds == () or _is_cut(change.bounds)):
            yield f"a change of plans at clock {change.clock} to a cut at {change.bounds!s:.80}"
        elif change.bounds == ():
            continue
        elif known is None or known.num_stages != len(change.bounds) - 1 or known.bounds[-1] != change.bounds[-1]:
            yield f"a cut of virtual worker {change.vw} at {change.bounds!s:.80}, which is not one of its layers"


def _mistakes_of_activations(config: ShardConfig) -> Iterator[str]:
    for activation in config.activations:
        layers = activation.inactive
        if not 0 <= activation.clock < MAX_COUNT or not _is_ascending(layers):
            yield f"inactive layers {layers!s:.80} from clock {activation.clock} on"
        if not _is_ascending(activation.fresh) or set(activation.fresh) & set(layers):
            yield f"layers {activation.fresh!s:.80} that are built anew at clock {activation.clock}"
    if not _is_ascending(config.progress.inactive):
        yield f"a start with the inactive layers {config.progress.inactive!s:.80}"
    if not _is_ascending(config.progress.fresh):
        yield f"a start with layers {config.progress.fresh!s:.80} that are built anew"


def _is_ascending(layers: Sequence[int]) -> bool:
    return all(before < after for before, after in pairwise((-1, *layers, MAX_COUNT)))


def _mistakes_of_freezing(freezing: Freezing | None, progress: Progress, membership: Membership) -> Iterator[str]:
    levels = (0,) if freezing is None else freezing.levels
    rises = all(0 <= before <= after < MAX_COUNT for before, after in pairwise(levels))
    if levels[:1] != (0,) or not rises:
        yield f"frozen layers {levels!s:.80}, which must rise from 0"
    for change in () if freezing is None else freezing.changes:
        at = [number for number in (change.clock, change.epoch) if number is not None]
        if not 0 <= change.frozen < len(levels) or len(at) != 1 or not 0 <= at[0] < MAX_COUNT:
            yield f"{change.frozen} of {len(levels) - 1} layers frozen at clock {change.clock} or epoch {change.epoch}"
    if freezing is not None and freezing.alpha is not None and not _is_part(freezing.alpha):
        yield f"α = {freezing.alpha!r:.40}, which must be above 0 and below 1"
    if freezing is not None and freezing.every_waves is not None and not 1 <= freezing.every_waves < MAX_COUNT:
        yield f"norms that decide every {freezing.every_waves} waves"
    for cut in () if freezing is None else freezing.cuts:
        if not 0 < cut.frozen < len(levels) or not _is_cut(cut.bounds):
            yield f"a cut of virtual worker {cut.vw} at {cut.bounds!s:.80} with {cut.frozen} frozen layers"
    if freezing is not None:
        yield from _mistakes_of_lineups(freezing.lineups, len(levels), progress, membership)
    if not 0 <= progress.frozen < len(levels):
        yield f"a start with {progress.frozen} frozen layers, of at most {len(levels) - 1}"


def _mistakes_of_lineups(
    lineups: tuple[FreezeLineup, ...], num_levels: int, progress: Progress, membership: Membership
) -> Iterator[str]:
    if not 0 <= progress.lineup <= progress.frozen:
        yield f"a start with the virtual workers for {progress.lineup} of {progress.frozen} frozen layers"
    for lineup in lineups:
        if not 0 <= lineup.frozen < num_levels or not 1 <= lineup.minibatches_per_wave < MAX_COUNT:
            yield f"waves of {lineup.minibatches_per_wave} minibatches with {lineup.frozen} frozen layers"
        if not lineup.workers or not all(vw in membership.num_stages for vw in lineup.members):
            yield f"virtual workers {lineup.members!s:.80} that train with {lineup.frozen} frozen layers"


def _is_part(text: str) -> bool:
    try:
        return 0 < Fraction(text) < 1
    except (ValueError, ZeroDivisionError):
        return False


def _mistakes_of_slices(slices: tuple[SlicePlan, ...]) -> Iterator[str]:
    for piece in slices:
        spec = piece.parameter
        if spec.dtype not in DTYPE_BYTES:
            yield f"slice {spec.name!r:.80} of dtype {spec.dtype!r:.40}; known are {', '.join(DTYPE_BYTES)}"
        if len(spec.name) > MAX_NAME_CHARACTERS:
            yield f"a parameter whose name has {len(spec.name)} characters"
        if len(spec.shape) > MAX_RANK or min(spec.shape, default=0) < 0 or max(spec.shape, default=0) >= MAX_COUNT:
            yield f"slice {spec.name!r:.80} of shape {str(spec.shape)[:80]}"
        elif not 0 <= piece.start <= piece.stop <= math.prod(spec.shape) < MAX_COUNT:
            yield f"slice {spec.name!r:.80} [{piece.start}, {piece.stop}) of {math.prod(spec.shape)} elements"
    if len({(piece.parameter.name, piece.start, piece.stop) for piece in slices}) < len(slices):
        yield "a duplicate slice"


def _mistakes_of_sync(sync: SyncSpec) -> Iterator[str]:
    if not 1 <= sync.minibatches_per_wave < MAX_COUNT or not 0 <= (sync.staleness or 0) < MAX_COUNT:
        yield f"N = {sync.minibatches_per_wave}, D = {sync.staleness}"
    if sync.combine not in _COMBINES:
        yield f"combine: {sync.combine!r:.40}; known are {', '.join(_COMBINES)}"


def _mistakes_of_data(data: DataSpec) -> Iterator[str]:
    length = data.epochs if data.total_minibatches is None else data.total_minibatches
    if not 0 <= data.num_samples < MAX_COUNT or not 1 <= data.batch_size < MAX_COUNT:
        yield f"{data.num_samples} samples in minibatches of {data.batch_size}"
    if length is None or not 0 <= min(length, data.epochs or 0) <= max(length, data.epochs or 0) < MAX_COUNT:
        yield f"{data.epochs} epochs, {data.total_minibatches} minibatches; one of the two bounds a run"
    if any(not 0 <= home < len(data.homes) for home in data.homes):
        yield f"nodes {data.homes!s:.80} of virtual workers"


def _mistakes_of_progress(progress: Progress, data: DataSpec) -> Iterator[str]:
    counts = (progress.clock, progress.epoch, progress.minibatches, progress.samples)
    if not 0 <= min(counts) <= max(counts) < MAX_COUNT:
        yield f"a start at clock {counts[0]}, epoch {counts[1]}, {counts[2]} minibatches, {counts[3]} samples"
    elif len(progress.used) != -(-data.num_samples // 8):
        yield f"a bitmap of {len(progress.used)} bytes for {data.num_samples} samples"
    elif data.num_samples % 8 and progress.used[-1] >> data.num_samples % 8:
        yield "a bitmap with used samples beyond the data"


def _mistakes_of_run(config: ShardConfig, run: RunDocument) -> Iterator[str]:
    plan = run.plan
    if config.shard:
        yield f"the document of a run on shard {config.shard}; it belongs on shard 0"
    if (plan.job_id, plan.term) != (config.job_id, config.term):
        yield f"the document of a run of job {plan.job_id!r:.80} in term {plan.term}"
    if not plan.num_shards == len(run.shards) == config.num_shards:
        yield f"the document of a run on {len(run.shards)} shards, planned for {plan.num_shards}"
    counts = [len(vw.stages) for vw in plan.virtual_workers]
    if not counts or min(counts) < 1 or sum(counts) > MAX_STAGES:
        yield f"the document of a run of {len(counts)} virtual workers of {sum(counts)} stages"
    elif [vw.index for vw in plan.virtual_workers] != list(range(len(counts))):
        yield "the document of a run whose virtual workers are not in order"
    if run.data != config.data or run.start != config.progress:
        yield "the document of a run with other data, or another start"


def check_run(config: ShardConfig, run: RunDocument) -> None:
    """Reject a run document that does not belong to the clock shard's run.

    Raises:
        ProtocolViolation: as named.
    """
    wrong = next(_mistakes_of_run(config, run), None)
    if wrong is not None:
        raise ProtocolViolation(f"a shard cannot store {wrong}")


def check_life(
    vw: VirtualWorkerIndex, incarnation: Incarnation, num_stages: int = 1, cut: tuple[int, ...] = ()
) -> None:
    """Reject an impossible virtual worker, incarnation or cut.

    Raises:
        ProtocolViolation: a number is out of range.
    """
    bounds = (
        ("virtual worker", vw, 0, MAX_STAGES - 1),
        ("incarnation", incarnation, 0, MAX_COUNT),
        ("number of stages", num_stages, 1, MAX_STAGES),
    )
    for what, value, least, most in bounds:
        if not least <= value <= most:
            raise ProtocolViolation(f"{what} {value} is not from {least} to {most}")
    if cut and not _is_cut(cut):
        raise ProtocolViolation(f"{cut!s:.80} is not a cut: bounds of stages increase from 0")


def _is_cut(bounds: tuple[int, ...]) -> bool:
    """Whether these are the bounds of stages with at least one layer each."""
    rises = all(first < last for first, last in pairwise(bounds))
    return 1 < len(bounds) <= MAX_STAGES + 1 and bounds[0] == 0 and rises and bounds[-1] < MAX_COUNT
