"""Every evaluation of a run, in `evaluations.jsonl` of its folder: one JSON object per line, appended.

After a rewind it goes on in the same file: what was evaluated after the checkpoint comes again, with another `rewinds`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from hetpipe.clock import Clock
from hetpipe.observe.log import get_logger
from hetpipe.values.events import Evaluated, JobEvent

_log = get_logger(__name__)

#: The file's name.
EVALUATIONS = "evaluations.jsonl"


def evaluation_line(evaluated: Evaluated, *, wall: float) -> str:
    """The line of an evaluation that was heard of `wall` seconds after 1970. Numbers that are not finite become null.

    >>> from hetpipe.values.ids import Clock
    >>> evaluation_line(Evaluated(Clock(6), 2, 46, {"loss": 0.5}), wall=0.0)
    '{"t":"1970-01-01T00:00:00Z","epoch":2,"clock":6,"minibatches":0,"samples":46,"rewinds":0,"within_epoch":false,"whole":true,"values":{"loss":0.5}}'
    """
    date = datetime.fromtimestamp(wall, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return json.dumps({"t": date, **evaluated.to_object()}, separators=(",", ":"))


def append_evaluations(run_dir: Path, events: Iterable[JobEvent], clock: Clock) -> None:
    """Append a line for every evaluation among `events`, with one write.

    A disk that does not take it is told in the log: the run goes on, and its newest evaluation is in its result anyway.
    """
    lines = [evaluation_line(event, wall=clock.wall()) for event in events if isinstance(event, Evaluated)]
    if not lines:
        return
    text = "".join(f"{line}\n" for line in lines).encode()
    try:
        descriptor = os.open(run_dir / EVALUATIONS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, text)
        finally:
            os.close(descriptor)
    except OSError as error:
        _log.warning("evaluation_not_written", path=str(run_dir / EVALUATIONS), reason=str(error))
