"""`hetpipe serve agent`: one per node. It starts the processes that import user code, and never imports it itself."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from hetpipe.errors import UserError
from hetpipe.forking.environment import SINGLE_THREADED
from hetpipe.forking.fork_server import own_fork_server
from hetpipe.observe.metrics_endpoint import metrics_endpoint
from hetpipe.pipeline.allowed_modules import OPTION
from hetpipe.roots import add_root_options, roots_of
from hetpipe.server.agent.agent import Agent, AgentConfig
from hetpipe.server.agent.children import Programs
from hetpipe.server.agent.devices import discover_devices
from hetpipe.server.agent.environment import OPTION as ENVIRONMENT_OPTION
from hetpipe.server.agent.environment import checked_allowed
from hetpipe.server.agent.readings import readings
from hetpipe.server.agent.sent_code import OPTION as ACCEPT_CODE
from hetpipe.server.runtime import (
    Shutdown,
    alive,
    announce_ready,
    new_parser,
    open_tls,
    own_name,
    port,
    run_service,
    started,
)
from hetpipe.values.identity import Role
from hetpipe.wire.listening import is_loopback
from hetpipe.wire.tls import TLS_VARIABLE

#: Shorter than the default grace period of container runtimes, 10 s.
DRAIN_SECONDS = 8.0
_LONGEST_DRAIN_SECONDS = 86_400.0

_LARGEST_STATUS = 255


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until terminated; returns the exit status."""
    parser = new_parser("agent", "The agent of one node: offers its devices and starts stages on them.")
    parser.add_argument("--coordinator", required=True, metavar="HOST:PORT", help="address of the coordinator")
    parser.add_argument("--node", metavar="NAME", help="name of this node, unique in the cluster (its host name)")
    parser.add_argument("--host", default="127.0.0.1", help="address other nodes reach this one by (%(default)s)")
    parser.add_argument(
        "--cpu-devices", type=int, metavar="N", help="offer N CPU devices (default: the CUDA devices, else one per CPU)"
    )
    parser.add_argument(
        "--devices-per-gpu",
        type=int,
        default=1,
        metavar="N",
        help="offer each GPU as N devices with an equal part of its memory, for N stages that share it (default: 1)",
    )
    parser.add_argument(
        "--stage-port",
        type=port,
        metavar="FIRST",
        help="link port of the stage on device I is FIRST+I (default: any free port); gloo links use further free "
        "ports",
    )
    parser.add_argument(
        "--stage-metrics-port",
        type=port,
        metavar="FIRST",
        help="serve the metrics of the stage on device I at http://HOST:(FIRST+I)/metrics (default: none)",
    )
    parser.add_argument(
        OPTION,
        action="append",
        metavar="PATTERN",
        help="allow jobs to import modules whose full name matches (* ? […]; repeatable); '*' for all, the default if "
        "--host is reachable from this machine only",
    )
    parser.add_argument(
        ENVIRONMENT_OPTION,
        action="append",
        metavar="PATTERN",
        help="allow jobs to inherit and set environment variables whose name matches (* ?; repeatable); '*' for all, "
        "the default if --host is reachable from this machine only, else none",
    )
    add_root_options(parser, with_code=True)
    parser.add_argument(
        ACCEPT_CODE,
        action="store_true",
        help="run code that was sent along with a job (submit --send-code), from a private folder, instead of the "
        "job's folder of code: whoever may submit jobs may then run code of their own here",
    )
    parser.add_argument(
        "--exit-with-coordinator", action="store_true", help="end with an error when the coordinator is lost"
    )
    parser.add_argument(
        "--drain-seconds",
        type=_seconds,
        default=DRAIN_SECONDS,
        metavar="S",
        help="grace period after SIGTERM in which virtual workers with a stage here finish their wave and leave the "
        "run (default: %(default)g); 0: end them immediately, as does a second SIGTERM",
    )
    parser.add_argument(
        "--sigterm-exit-status",
        type=_status,
        default=0,
        metavar="N",
        help="exit status after SIGTERM (default: 0); for supervisors that treat 0 as completion and would not restart "
        "the agent",
    )
    options = parser.parse_args(arguments)
    status = run_service("agent", options, lambda shutdown: _serve(options, shutdown))
    return status or options.sigterm_exit_status


def _serve(options: argparse.Namespace, shutdown: Shutdown) -> None:
    tls = open_tls(options, options.host)
    # Forked processes never have the agent's identity: they have none, or that of their own certificate.
    inherited = {name: value for name, value in os.environ.items() if name != TLS_VARIABLE}
    fork_server = own_fork_server({**inherited, **SINGLE_THREADED})
    fork_server.begin()
    node = own_name(options, tls, Role.AGENT, option="--node", given=options.node or "") or socket.gethostname()
    if "/" in node:
        raise UserError(f"--node {node!r} must not contain a slash: devices are named NODE/INDEX")
    agent = Agent(
        AgentConfig(
            node=node,
            host=options.host,
            pid=os.getpid(),
            coordinator=options.coordinator,
            tls=tls,
            devices=discover_devices(
                node, num_cpu_devices=options.cpu_devices, devices_per_gpu=options.devices_per_gpu
            ),
            environment=os.environ,
            machine=socket.gethostname(),
            first_metrics_port=options.stage_metrics_port,
            first_link_port=options.stage_port,
            drain_seconds=options.drain_seconds,
            exit_with_coordinator=options.exit_with_coordinator,
            programs=replace(
                _programs(options.host, options.allow_modules),
                allowed_environment=_allowed_environment(options.host, options.allow_environment),
            ),
            fork_server=fork_server,
            accepts_code=options.accept_code,
            roots=roots_of(options, is_reached=not is_loopback(options.host)),
        )
    )
    shutdown.on_request(agent.stop)
    with (
        metrics_endpoint(options.host, options.metrics_port, "agent", partial(readings, agent)),
        # It waits for its coordinator without limit, so a restart by a liveness probe would not help.
        alive(options.host, options.health_port) as now_serves,
    ):
        if not started(agent.start, shutdown):
            return
        now_serves()
        announce_ready("agent", options.host)
        agent.run()


def _seconds(text: str) -> float:
    """Parse a duration, for `add_argument(type=…)`."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds <= _LONGEST_DRAIN_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to {_LONGEST_DRAIN_SECONDS:.0f}")
    return seconds


def _status(text: str) -> int:
    """Parse an exit status, for `add_argument(type=…)`."""
    if not text.isascii() or not text.isdigit() or int(text) > _LARGEST_STATUS:
        raise argparse.ArgumentTypeError(f"{text!r} is not an exit status; write a number from 0 to {_LARGEST_STATUS}")
    return int(text)


def _allowed_environment(host: str, patterns: Sequence[str] | None) -> tuple[str, ...] | None:
    """Patterns of variables that jobs may inherit and set; None: any.

    Raises:
        UserError: a pattern is empty.
    """
    if patterns is not None:
        return checked_allowed(patterns)
    return None if is_loopback(host) else ()


def _programs(host: str, patterns: Sequence[str] | None) -> Programs:
    """The programs of children. Jobs choose their imports, so an agent reachable from other machines must limit these.

    Raises:
        UserError: the limit is missing.
    """
    if patterns is not None:
        return Programs().allowing(patterns)
    if is_loopback(host):
        return Programs()
    raise UserError(
        f"--host {host} is reachable from other machines, so limit the modules that jobs may import here: "
        f"{OPTION} 'my_project.*', or {OPTION} '*' if you trust everyone who can submit jobs with all installed modules"
    )
