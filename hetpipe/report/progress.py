"""The progress of a run as text: the model behind the live table and the piped lines. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hetpipe.report.text import count, duration, loss_first, measure, pairs, percent, rate
from hetpipe.values.events import (
    Evaluated,
    JobState,
    Notice,
    ProgressTable,
    StageRow,
    Straggling,
    VirtualWorkerRow,
)
from hetpipe.values.life_state import WORKING, LifeState
from hetpipe.values.measurement import ProfileStep
from hetpipe.values.memory import policies_text
from hetpipe.values.quantities import bytes_text, of_bytes_text
from hetpipe.values.run import CacheUse

#: States, for people.
STATE_TEXTS: dict[JobState, str] = {
    JobState.SUBMITTED: "submitted",
    JobState.PENDING: "waiting in the queue for devices and parameter servers",
    JobState.INSPECTING: "inspecting the model",
    JobState.PLANNING: "planning",
    JobState.STARTING: "starting the stages",
    JobState.RUNNING: "running",
    JobState.STOPPING: "stopping",
    JobState.FINISHED: "finished",
    JobState.STOPPED: "stopped",
    JobState.FAILED: "failed",
}


def measuring_text(step: ProfileStep) -> str:
    """Which layer is being measured, for the bar on a terminal.

    >>> measuring_text(ProfileStep("cpu", "h.2", 2, 14))
    'measuring h.2 on cpu'
    """
    return f"measuring {step.layer} on {step.device_type}"


def measuring_pairs(step: ProfileStep, unit: str = "layers") -> dict[str, object]:
    """The same as the keys and values of a line; `unit` is the noun for the counted steps.

    >>> measuring_pairs(ProfileStep("cpu", "h.2", 2, 14))
    {'measuring': 'h.2', 'on': 'cpu', 'layers': '2/14'}
    """
    return {"measuring": step.layer, "on": step.device_type, unit: f"{step.done}/{step.total}"}


def headings(table: ProgressTable) -> list[str]:
    """Headings of the live table; the column of the distance includes its bound."""
    bound = "no bound" if table.staleness is None else f"D = {table.staleness}"
    return ["worker", "stages: layers on device", "clock", f"ahead ({bound})", "samples/s", "loss", "waiting", "ETA"]


def cells(table: ProgressTable) -> list[list[str]]:
    """The live table's rows, one per virtual worker."""
    return [
        [
            str(row.vw),
            cut_text(row),
            str(row.clock),
            distance_text(row, table.staleness),
            rate(row.samples_per_second),
            loss_text(row),
            percent(row.waiting_share),
            # All virtual workers end at the same barrier.
            duration(table.eta_seconds),
        ]
        for row in table.rows
    ]


def loss_text(row: VirtualWorkerRow) -> str:
    """The loss, and in brackets each one by name if there are several: `1.234 (main 1.2, aux 0.34)`."""
    each = ", ".join(f"{name} {measure(value)}" for name, value in sorted(row.losses.items()))
    return f"{measure(row.loss)} ({each})" if each else measure(row.loss)


def cut_text(row: VirtualWorkerRow) -> str:
    """Layers and devices of its stages, with the version of its plan once layers have moved."""
    return stages_text(row.stages) + (f" (plan version {row.version})" if row.version else "")


def stages_text(stages: Sequence[StageRow]) -> str:
    """Layers and devices of the stages, first stage first.

    >>> from hetpipe.values.ids import DeviceId, LayerIndex
    >>> rows = [(0, 1, "n0/0"), (1, 4, "n0/1")]
    >>> stages_text([StageRow(LayerIndex(first), LayerIndex(last), DeviceId(on)) for first, last, on in rows])
    '0 on n0/0, 1-3 on n0/1'
    >>> stages_text([StageRow(LayerIndex(1), LayerIndex(3), DeviceId("n0/1"), memory=("swap", "keep"))])
    '1-2 on n0/1 (layers 1 swap, 2 keep)'
    """
    texts = [(stage, policies_of_stage(stage)) for stage in stages]
    return ", ".join(f"{_layers(stage)} on {stage.device}{f' ({text})' if text else ''}" for stage, text in texts)


def policies_of_stage(stage: StageRow) -> str:
    """The memory policies of its layers; empty if all are kept."""
    if len(set(stage.memory)) == 1:
        return stage.memory[0]
    return policies_text(stage.memory, stage.first_layer)


def memory_text(row: VirtualWorkerRow) -> str:
    """Memory of each of its devices in use at most so far, and how much there is: `0.3 of 12 GiB, 0.2 of 12 GiB`."""
    if not any(stage.memory_bytes for stage in row.stages):  # not yet, or from a coordinator of an earlier version
        return bytes_text(row.memory_bytes)
    return ", ".join(stage_memory_text(stage) or bytes_text(0) for stage in row.stages)


def stage_memory_text(stage: StageRow) -> str:
    """Memory of its device in use at most so far, and how much there is, if known; empty before its first report."""
    if not stage.memory_bytes:
        return ""
    return (
        of_bytes_text(stage.memory_bytes, stage.device_bytes) if stage.device_bytes else bytes_text(stage.memory_bytes)
    )


def _layers(stage: StageRow) -> str:
    last = stage.last_layer - 1
    return str(stage.first_layer) if last == stage.first_layer else f"{stage.first_layer}-{last}"


def distance_text(row: VirtualWorkerRow, staleness: int | None) -> str:
    """Waves ahead of the slowest and the limit; the state, if it does not compute or is leaving."""
    if row.state not in WORKING:
        return row.state
    ahead = str(row.distance) if staleness is None else f"{row.distance} of {staleness + 1}"
    return f"{ahead}, {row.state}" if row.state is LifeState.LEAVING else ahead


def totals_text(table: ProgressTable) -> str:
    """The run as a whole: `epoch 3, 3972 of 28840 samples (13.8 %), 4151 samples/s, ETA 6.0 s`."""
    share = percent(table.samples / table.total_samples) if table.total_samples else "-"
    return (
        f"epoch {table.epoch}, {table.samples} of {count(table.total_samples, 'sample')} ({share}), "
        f"{rate(table.samples_per_second)} samples/s, "
        f"{speeds_text(table.tokens_per_second, table.model_flops_utilisation)}ETA {duration(table.eta_seconds)}"
    )


def speeds_text(tokens_per_second: float | None, model_flops_utilisation: float | None) -> str:
    """Tokens and MFU, if known, each followed by a comma: `9120 tokens/s, 41.0 % MFU, `."""
    tokens = "" if tokens_per_second is None else f"{rate(tokens_per_second)} tokens/s, "
    return tokens if model_flops_utilisation is None else f"{tokens}{percent(model_flops_utilisation)} MFU, "


def cache_text(use: CacheUse) -> str:
    """Use of the caches behind frozen layers.

    >>> cache_text(CacheUse(reads=190, computed=10, read_bytes=3 << 20, kept_bytes=1 << 20))
    'cache: 190 minibatches read (3 MiB), 10 computed by stages with frozen layers, 1 MiB kept'
    >>> cache_text(CacheUse(reads=0, computed=10, read_bytes=0, kept_bytes=0, stopped="/tmp is full"))
    'cache: 0 minibatches read (0 bytes), 10 computed by stages with frozen layers; nothing more is kept: /tmp is full'
    """
    kept = f", {bytes_text(use.kept_bytes)} kept" if use.kept_bytes else ""
    if use.stopped:
        kept += f"; nothing more is kept: {use.stopped}"
    read = f"{count(use.reads, 'minibatch', 'minibatches')} read ({bytes_text(use.read_bytes)})"
    return f"cache: {read}, {use.computed} computed by stages with frozen layers{kept}"


def no_utilisation_text(reason: str) -> str:
    """The reason for the absence of MFU."""
    return f"no MFU: {reason}"


def slow_text(slow: Straggling) -> str:
    """A straggler: `stage 1 of virtual worker 0 takes 9.5 times as long as planned`."""
    return f"stage {slow.stage} of virtual worker {slow.vw} takes {slow.factor:.1f} times as long as planned"


def evaluation_text(evaluated: Evaluated) -> str:
    """The latest evaluation: `evaluation after epoch 2: loss 0.1312, accuracy 0.9634 (355 samples)`."""
    values = ", ".join(f"{name} {measure(value)}" for name, value in _loss_first(evaluated.values).items())
    samples = count(evaluated.samples, "sample")
    return f"evaluation {place_of(evaluated)}: {values} ({samples})"


class _Placed(Protocol):
    @property
    def epoch(self) -> int: ...
    @property
    def clock(self) -> int: ...
    @property
    def within_epoch(self) -> bool: ...


def place_of(evaluated: _Placed) -> str:
    """`after epoch 2, clock 12`, or `in epoch 3, clock 15`."""
    return f"{'in' if evaluated.within_epoch else 'after'} epoch {evaluated.epoch}, clock {evaluated.clock}"


def _loss_first(values: dict[str, float]) -> dict[str, float]:
    return {name: values[name] for name in loss_first(values)}


def _other_speeds(table: ProgressTable) -> dict[str, object]:
    values = {"tokens_per_second": table.tokens_per_second, "model_flops_utilisation": table.model_flops_utilisation}
    return {name: round(value, 4) for name, value in values.items() if value is not None}


def table_line(table: ProgressTable) -> str:
    """The whole table as one `key=value` line."""
    values: dict[str, object] = {
        "state": JobState.RUNNING,
        "epoch": table.epoch,
        "samples": f"{table.samples}/{table.total_samples}",
        "samples_per_second": round(table.samples_per_second, 1),
        **_other_speeds(table),
        "eta_seconds": None if table.eta_seconds is None else round(table.eta_seconds, 1),
        "global_clock": table.global_clock,
        "D": "none" if table.staleness is None else table.staleness,
    }
    for row in table.rows:
        name = f"vw{row.vw}"
        values[f"{name}.state"] = None if row.state is LifeState.READY else row.state
        values[f"{name}.clock"] = row.clock
        values[f"{name}.ahead"] = row.distance if row.state in WORKING else None
        values[f"{name}.samples_per_second"] = round(row.samples_per_second, 1)
        values[f"{name}.loss"] = row.loss
        values |= {f"{name}.loss.{one}": value for one, value in sorted(row.losses.items())}
        values[f"{name}.waiting_percent"] = round(100 * row.waiting_share, 1)
    for slow in table.slow:
        values[f"vw{slow.vw}.stage{slow.stage}.slower_than_planned"] = round(slow.factor, 1)
    return pairs(values)


def evaluation_line(evaluated: Evaluated) -> str:
    """An evaluation as one `key=value` line."""
    place: dict[str, object] = {"event": "evaluation", "epoch": evaluated.epoch, "clock": evaluated.clock}
    if not evaluated.whole:
        place["whole"] = "false"
    return pairs({**place, "samples": evaluated.samples, **_loss_first(evaluated.values)})


def notice_line(notice: Notice) -> str:
    """A notice as one `key=value` line."""
    return pairs({"event": notice.kind, **notice.pairs})
