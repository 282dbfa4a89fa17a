"""`python -m services.coordinator`: one per cluster. It never imports torch or user code."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.coordinator.coordinator import Coordinator
from hetpipe.coordinator.servicer import NUM_THREADS, CoordinatorServicer
from hetpipe.coordinator.stores import open_store
from hetpipe.coordinator.tasks import ShardPort, Tools
from hetpipe.rpc.channel import join_address, split_address
from hetpipe.rpc.server import Server, ServerConfig
from hetpipe.spec.sync import Progress
from services.runtime import Shutdown, add_listening_options, advertised_host, announce_ready, new_parser, run_service

#: Seconds between two ticks, and longest time to end all jobs at the end.
_TICK_SECONDS = 0.2
_DRAIN_SECONDS = 5.0


def open_shard(address: str) -> ShardPort:
    """The control connection to a shard."""
    from hetpipe.ps.control import ShardControl

    return ShardControl(address)


def read_progress(folder: str) -> Progress:
    """How far a checkpoint is."""
    from hetpipe.ps.manifest import read_manifest

    return read_manifest(Path(folder)).progress


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until told to end; the exit status."""
    parser = new_parser("coordinator", "The coordinator: membership, jobs, plans.")
    add_listening_options(parser)
    parser.add_argument(
        "--store",
        default="memory",
        metavar="URL",
        help="`memory` (default) or redis://HOST:PORT/DB: where jobs are kept",
    )
    options = parser.parse_args(arguments)
    return run_service("coordinator", options, lambda shutdown: _serve(options, shutdown))


def _serve(options: argparse.Namespace, shutdown: Shutdown) -> None:
    coordinator = Coordinator(
        open_store(options.store), Tools(open_shard=open_shard, read_progress=read_progress), clock=SYSTEM_CLOCK
    )
    host = advertised_host(options.host, options.advertise)
    server = Server(
        ServerConfig(host=options.host, port=options.port, num_threads=NUM_THREADS, reflection=options.reflection)
    )
    CoordinatorServicer(coordinator, host=host).add_to(server)
    try:
        _, port = split_address(server.start())
        announce_ready("coordinator", join_address(host, port))
        while not shutdown.asked.wait(_TICK_SECONDS):
            coordinator.tick()
        _drain(coordinator)
        server.stop()
    finally:
        coordinator.close()


def _drain(coordinator: Coordinator) -> None:
    """End all jobs while the agents can still hear of it."""
    coordinator.drain()
    deadline = SYSTEM_CLOCK.monotonic() + _DRAIN_SECONDS
    pause = threading.Event()
    while not coordinator.is_idle and SYSTEM_CLOCK.monotonic() < deadline:
        pause.wait(_TICK_SECONDS)
        coordinator.tick()


if __name__ == "__main__":
    sys.exit(main())
