"""`python -m tests.chaos.measured_shard KEEPING ...`: a parameter server that keeps less on its disk than it has to.

For `costs` alone, which compares it with the real one: nobody can ask `services.parameter_server` for this, because a
run on it does not outlive it. What comes behind KEEPING are the options of `services.parameter_server`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

from hetpipe.ps.job_state import StateOptions
from hetpipe.ps.push_log import PushLimits
from services.parameter_server import __main__ as service

#: More than is ever pushed.
_NEVER = 1 << 50


def _nothing(**_options: Any) -> None:
    """No log of pushes, none of decisions, no snapshot."""


KEEPING: dict[str, Callable[..., StateOptions | None]] = {
    "nothing": _nothing,
    # Logs that are never shortened, so that no snapshot is ever due.
    "log": partial(StateOptions, limits=PushLimits(_NEVER, _NEVER, _NEVER)),
}

if __name__ == "__main__":
    with patch.object(service, "StateOptions", KEEPING[sys.argv[1]]):
        sys.exit(service.main(sys.argv[2:]))
