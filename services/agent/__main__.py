"""`python -m services.agent`: one per node. It starts the processes that import user code, and never does so itself."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence

from hetpipe.agent.agent import Agent, AgentConfig
from hetpipe.agent.devices import discover_devices
from hetpipe.errors import UserError
from services.runtime import Shutdown, announce_ready, new_parser, run_service


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until told to end; the exit status."""
    parser = new_parser("agent", "The agent of one node: offers its devices and starts the stages on them.")
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT", help="address of the coordinator")
    parser.add_argument("--node", metavar="NAME", help="name of this node, unique in the cluster (its host name)")
    parser.add_argument("--host", default="127.0.0.1", help="address other nodes reach this one by (%(default)s)")
    parser.add_argument(
        "--cpu-devices", type=int, metavar="N", help="offer N CPU devices (default: the CUDA devices, else one per CPU)"
    )
    parser.add_argument(
        "--exit-with-coordinator", action="store_true", help="end with an error when the coordinator is lost"
    )
    options = parser.parse_args(arguments)
    return run_service("agent", options, lambda shutdown: _serve(options, shutdown))


def _serve(options: argparse.Namespace, shutdown: Shutdown) -> None:
    node = options.node or socket.gethostname()
    if "/" in node:
        raise UserError(f"--node {node!r} must not contain a slash: devices are named NODE/INDEX")
    agent = Agent(
        AgentConfig(
            node=node,
            host=options.host,
            pid=os.getpid(),
            coordinator=options.coordinator,
            devices=discover_devices(node, num_cpu_devices=options.cpu_devices),
            environment=os.environ,
            exit_with_coordinator=options.exit_with_coordinator,
        )
    )
    shutdown.on_ask(agent.stop)
    agent.start()
    announce_ready("agent", options.host)
    agent.run()


if __name__ == "__main__":
    sys.exit(main())
