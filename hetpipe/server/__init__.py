"""The programs of a cluster, `hetpipe serve coordinator | parameter-server | agent`: shells around the packages below.

Their entry points are `coordinator.main`, `shard.main` and `agent.main`; `runtime` is what all of them do around their
work. `services/` of the repository calls the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module

#: What `hetpipe serve` can run: name → module, whose `main` takes the options and returns the exit status.
SERVICES: Mapping[str, str] = {
    "coordinator": "hetpipe.server.coordinator.main",
    "parameter-server": "hetpipe.server.shard.main",
    "agent": "hetpipe.server.agent.main",
}


def serve(service: str, options: Sequence[str]) -> int:
    """Run a service of `SERVICES` until it is told to end; the exit status.

    Each imports what it needs and nothing of the others: a coordinator has no torch.
    """
    status: int = import_module(SERVICES[service]).main(options)
    return status
