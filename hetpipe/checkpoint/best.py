"""The best checkpoint of a run by a metric of its evaluations, which is kept beyond the newest ones.

The coordinator, which assembles evaluations, notes the clock of the best one in `checkpoints/best.json`; the keeper at
the clock shard does not delete the checkpoint at that clock. The next checkpoint is complete a barrier later, long
after the evaluation; if it was not noted by then, with `keep: 1`, the best one is lost, and `find_best` says so.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hetpipe.checkpoint.manifest import MANIFEST, checkpoint_dir
from hetpipe.durable import make_dir, replacing
from hetpipe.errors import CheckpointError, ProtocolViolation
from hetpipe.values.ids import Clock
from hetpipe.values.rewinds import run_folders
from hetpipe.values.wire import from_json, plain

_FILE = "best.json"


@dataclass(frozen=True, slots=True)
class Best:
    """The best evaluation of a run so far."""

    clock: Clock
    """Of its weights, and of their checkpoint."""
    metric: str
    value: float


def note_best(run_dir: Path, best: Best) -> None:
    """Write the best evaluation of the run, or of its rewind, in `run_dir`. Atomic and idempotent.

    Raises:
        OSError: it cannot be written.
    """
    path = run_dir / "checkpoints" / _FILE
    if read_best(run_dir) == best:
        return
    make_dir(path.parent)
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(plain(Best, best)) + "\n", encoding="utf-8")


def read_best(run_dir: Path) -> Best | None:
    """What was noted in `run_dir`; None without any, or if it cannot be read."""
    try:
        found: Best = from_json(Best, (run_dir / "checkpoints" / _FILE).read_bytes())
    except (OSError, ProtocolViolation):
        return None
    return found


def find_best(run_dir: Path) -> tuple[Path, Best]:
    """The folder of the best checkpoint of a run, whichever of its rewinds has it, and its evaluation.

    Raises:
        CheckpointError: nothing was noted, or that checkpoint is not there.
    """
    folders = list(reversed(run_folders(run_dir)))
    best = next((noted for noted in map(read_best, folders) if noted is not None), None)
    if best is None:
        raise CheckpointError(
            f"{run_dir} has no best checkpoint: it has made no evaluation, or its job names no metric; set "
            "checkpoint.best or early_stopping"
        )
    for folder in (checkpoint_dir(where, best.clock) for where in folders):
        if (folder / MANIFEST).exists():
            return folder, best
    raise CheckpointError(
        f"{run_dir} no longer has the checkpoint at clock {best.clock}, where {best.metric} was best; a larger "
        "checkpoint.keep keeps older ones"
    )
