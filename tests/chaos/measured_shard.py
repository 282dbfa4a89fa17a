"""`python -m tests.chaos.measured_shard KEEPING ...`: a parameter server that keeps less on its disk than it has to.

For `costs` alone, which compares it with the real one: nobody can ask `hetpipe serve parameter-server` for this,
because a run on it does not outlive it. What comes behind KEEPING are the options of that command.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

from hetpipe.server.shard import main as service
from hetpipe.storage.wal import snapshotted_log


def _nothing(*_arguments: object, **_options: object) -> None:
    """No log of pushes, none of decisions; or no snapshot."""


#: What is put in place of what: a log is shortened as ever, whether or not there is a snapshot in place of its files.
KEEPING: Mapping[str, tuple[Any, str, Callable[..., None]]] = {
    "nothing": (service, "StateOptions", _nothing),
    "log": (snapshotted_log, "write_snapshot", _nothing),
}

if __name__ == "__main__":
    with patch.object(*KEEPING[sys.argv[1]]):
        sys.exit(service.main(sys.argv[2:]))
