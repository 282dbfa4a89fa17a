"""The programs of a cluster, `hetpipe serve coordinator | parameter-server | agent`: shells around the packages below.

Their entry points are `coordinator.main`, `shard.main` and `agent.main`; `runtime` has their common
options, signals and errors. `services/` of the repository calls the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

#: Services of `hetpipe serve`: name → the module whose `main` takes the options and returns the exit status.
SERVICES: Mapping[str, str] = {
    "coordinator": "hetpipe.server.coordinator.main",
    "parameter-server": "hetpipe.server.shard.main",
    "agent": "hetpipe.server.agent.main",
}


def serve(service: str, options: Sequence[str]) -> int:
    """Run a service of `SERVICES` until it is terminated; returns its exit status.

    Each imports only its own dependencies: a coordinator runs without torch.
    """
    match service:
        case "coordinator":
            from hetpipe.server.coordinator.main import main
        case "parameter-server":
            from hetpipe.server.shard.main import main
        case _:
            assert service == "agent", service
            from hetpipe.server.agent.main import main
    return main(options)
