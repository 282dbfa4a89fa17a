"""History files of a parameter server, in the run's folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.clock import Clock as TimeSource
from hetpipe.errors import UserError
from hetpipe.observe.clock_curve import CLOCK_SHARD_FILE, ClockReduction
from hetpipe.observe.history import History, HistoryWriter, NullHistory
from hetpipe.values.shard_config import ShardConfig

#: Opens the history of a job on this shard.
HistoryFactory = Callable[[ShardConfig], HistoryWriter]


def file_history(host: str, pid: int, clock: TimeSource = SYSTEM_CLOCK) -> HistoryFactory:
    """Histories in the run's folder, `RUN_DIR/history/shard-N.jsonl`."""

    def open_history(config: ShardConfig) -> HistoryWriter:
        if not config.keeps_history:
            return NullHistory()
        path = Path(config.run_dir) / "history" / f"shard-{config.shard}.jsonl"
        # The clock shard's history covers all virtual workers; the others' cover sums.
        reduction = ClockReduction() if path.name == CLOCK_SHARD_FILE else None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return History(
                path, host=host, pid=pid, role="parameter_server", term=config.term, clock=clock, reduction=reduction
            )
        except OSError as error:
            raise UserError(
                f"shard {config.shard} cannot write {path}: {error.strerror}; every parameter server needs the folder "
                "of the run under the same path"
            ) from error

    return open_history
