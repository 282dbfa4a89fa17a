"""Trace of a simulated run, in the format of a real run's timeline (`observe`)."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from hetpipe.decide.planner.costs import TICKS_PER_MS
from hetpipe.decide.simulator.result import ActivityKind, SimulatedActivity
from hetpipe.observe.timeline import Activity, Timeline, Value, merge_timelines

_TICKS_PER_SECOND = 1000 * TICKS_PER_MS

#: Activities shown; publications take no time and belong to no stage.
_SHOWN = {
    ActivityKind.FORWARD: Activity.FORWARD,
    ActivityKind.BACKWARD: Activity.BACKWARD,
    ActivityKind.ACTIVATIONS: Activity.SEND,
    ActivityKind.GRADIENTS: Activity.SEND,
    ActivityKind.PUSH: Activity.PUSH,
    ActivityKind.PULL: Activity.PULL,
}

#: Meaning of the number of a transfer.
_NUMBERED = {
    ActivityKind.ACTIVATIONS: "p",
    ActivityKind.GRADIENTS: "p",
    ActivityKind.PUSH: "wave",
    ActivityKind.PULL: "clock",
}


def write_trace(activities: Sequence[SimulatedActivity], out: Path) -> None:
    """Write the trace of a simulation in Chrome's JSON format.

    Args:
        activities: all activities of the simulation.
        out: the file; replaced when the trace is complete.

    Raises:
        OSError: it cannot be written.
    """
    by_stage: dict[tuple[int, int], list[SimulatedActivity]] = {}
    for activity in activities:
        if activity.vw is not None and activity.stage is not None:
            by_stage.setdefault((activity.vw, activity.stage), []).append(activity)
    with tempfile.TemporaryDirectory() as folder:
        fragments = []
        for (vw, stage), own in sorted(by_stage.items()):
            fragments.append(Path(folder) / f"vw-{vw}-stage-{stage}.jsonl")
            _write_fragment(fragments[-1], vw, stage, own)
        merge_timelines(fragments, out)


def _write_fragment(path: Path, vw: int, stage: int, activities: Sequence[SimulatedActivity]) -> None:
    timeline = Timeline(
        path,
        process_index=vw,
        process_name=f"virtual worker {vw}",
        thread_index=stage,
        thread_name=f"stage {stage}",
        host="simulated",
    )
    for activity in activities:
        numbered = _NUMBERED.get(activity.kind)
        args: dict[str, Value] = {} if activity.shard is None else {"shard": activity.shard}
        if numbered is not None and numbered != "p":
            args[numbered] = activity.number
        timeline.record(
            _SHOWN[activity.kind],
            start_seconds=activity.start_ticks / _TICKS_PER_SECOND,
            end_seconds=activity.end_ticks / _TICKS_PER_SECOND,
            p=activity.number if numbered in (None, "p") else None,
            **args,
        )
    timeline.close()
