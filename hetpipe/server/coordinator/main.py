"""`hetpipe serve coordinator`: one per cluster. It never imports torch or user code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.decide.lifecycle import patience
from hetpipe.observe.log import get_logger
from hetpipe.observe.metrics_endpoint import metrics_endpoint
from hetpipe.observe.rpc_counters import RPC_COUNTERS
from hetpipe.roots import add_root_options, roots_of
from hetpipe.server.coordinator.candidate import Candidate
from hetpipe.server.coordinator.coordinator import Coordinator
from hetpipe.server.coordinator.readings import readings
from hetpipe.server.coordinator.servicer import CONCURRENT_CALLS, NUM_THREADS, CoordinatorServicer
from hetpipe.server.coordinator.tasks import Certify, Tools
from hetpipe.server.runtime import (
    Shutdown,
    add_listening_options,
    advertised_host,
    announce_ready,
    certified_name,
    new_parser,
    open_tls,
    run_service,
    server_config,
)
from hetpipe.storage.redis_access import access_of
from hetpipe.storage.store import FenceSource
from hetpipe.storage.stores import open_store
from hetpipe.values.addresses import join_address, split_address
from hetpipe.values.identity import Role
from hetpipe.values.leases import LEADER_LEASE_SECONDS, LEASE_SECONDS
from hetpipe.values.members import MemberInfo
from hetpipe.values.sync import Progress
from hetpipe.wire.call import Calls
from hetpipe.wire.listening import is_loopback
from hetpipe.wire.server import Server
from hetpipe.wire.tls import Tls

_log = get_logger(__name__)

#: Seconds between two ticks.
_TICK_SECONDS = 0.2

_SHORTEST_LEASE_SECONDS = 1.0
_LONGEST_LEASE_SECONDS = 3_600.0


def open_shard(shard: MemberInfo, *, tls: Tls | None, fence: FenceSource) -> Calls:
    """Open the control connection to a shard."""
    from hetpipe.wire.shard_client import connect_shard

    return connect_shard(shard.address, member_id=shard.id, tls=tls, fence=fence)


def stage_signer(tls: Tls | None) -> Certify | None:
    """Load the signer of stage certificates; None without TLS.

    Raises:
        UserError: the folder is not a coordinator's, or has no signer.
    """
    if tls is None:
        return None
    certified_name(tls, Role.COORDINATOR)
    # Imported only with TLS, as it is slow.
    from hetpipe.certs.folders import StageSigner

    return StageSigner(tls.folder).sign


def read_progress(where: str) -> Progress:
    """Read the progress stored in a checkpoint."""
    from hetpipe.checkpoint.locations import manifest_at

    return manifest_at(where).progress


def newest_checkpoint(run: str) -> str | None:
    """Folder of the newest complete checkpoint of a run, if any."""
    from hetpipe.checkpoint.locations import newest_complete_at

    return newest_complete_at(run)


def listed_checkpoint(run: str) -> str | None:
    """Same as `newest_checkpoint`, verified only by manifest and file sizes."""
    from hetpipe.checkpoint.locations import newest_listed_at

    return newest_listed_at(run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until terminated; return the exit status."""
    parser = new_parser("coordinator", "The coordinator: membership, jobs, plans.")
    add_listening_options(parser)
    parser.add_argument(
        "--store",
        default="memory",
        metavar="URL",
        help="where jobs are kept: `memory` (default), redis://USER@HOST:PORT/DB, or rediss://… for TLS; a Redis that "
        "asks for a certificate is shown that of --tls",
    )
    parser.add_argument(
        "--store-password-file", type=Path, metavar="FILE", help="the password of Redis is the text in FILE"
    )
    parser.add_argument(
        "--store-ca",
        type=Path,
        metavar="FILE",
        help="authority (PEM) that signed the certificate of Redis (default: the system's trust store)",
    )
    parser.add_argument(
        "--store-replicas",
        type=_replicas,
        default=0,
        metavar="N",
        help="replicas of Redis that must have a write before it counts, so that a failover to one of them loses none "
        "(%(default)s)",
    )
    parser.add_argument(
        "--leader-lease",
        type=_lease,
        default=LEADER_LEASE_SECONDS,
        metavar="S",
        help="seconds without the store after which this coordinator exits and a standby leads (%(default)s)",
    )
    parser.add_argument(
        "--lease",
        type=_lease,
        default=LEASE_SECONDS,
        metavar="S",
        help="seconds without a heartbeat after which an agent or a parameter server counts as gone (%(default)s)",
    )
    add_root_options(parser, with_code=False)
    options = parser.parse_args(arguments)
    return run_service("coordinator", options, lambda shutdown: _serve(options, shutdown))


def _serve(options: argparse.Namespace, shutdown: Shutdown) -> None:
    tls = open_tls(options, options.host)
    certify = stage_signer(tls)
    access = access_of(
        options.store,
        password_file=options.store_password_file,
        ca=options.store_ca,
        tls=None if tls is None else tls.folder,
    )
    host = advertised_host(options.host, options.advertise)
    server = Server(server_config(options, tls, num_threads=NUM_THREADS, max_concurrent_calls=CONCURRENT_CALLS))
    election = Candidate(
        open_store(options.store, access=access, replicas=options.store_replicas),
        f"the coordinator on {host} with pid {os.getpid()}",
        clock=SYSTEM_CLOCK,
        on_lost=_end_at_once,
        lease_seconds=options.leader_lease,
    )
    try:
        server.stand_by()
        if not election.run_for(shutdown.requested):
            server.stop()
            return
        tools = Tools(
            open_shard=partial(open_shard, tls=tls, fence=lambda: election.fence),
            read_progress=read_progress,
            newest_checkpoint=newest_checkpoint,
            listed_checkpoint=listed_checkpoint,
            certify=certify,
            roots=roots_of(options, is_reached=not is_loopback(options.host)),
        )
        store = open_store(options.store, access=access, fence=lambda: election.fence, replicas=options.store_replicas)
        coordinator = Coordinator(
            store,
            tools,
            clock=SYSTEM_CLOCK,
            patience=patience.patience_for(options.lease),
            lease_seconds=options.lease,
            election=election,
        )
        _act(options, shutdown, server, coordinator)
    finally:
        election.end()


def _act(options: argparse.Namespace, shutdown: Shutdown, server: Server, coordinator: Coordinator) -> None:
    """Serve as the coordinator until terminated. Jobs continue without one, and the next one adopts them."""
    host = advertised_host(options.host, options.advertise)
    CoordinatorServicer(coordinator, host=host).add_to(server)
    try:
        _, port = split_address(server.start())
        sources = (RPC_COUNTERS.readings, partial(readings, coordinator))
        with metrics_endpoint(options.host, options.metrics_port, "coordinator", *sources):
            announce_ready("coordinator", join_address(host, port))
            while not shutdown.requested.wait(_TICK_SECONDS):
                coordinator.tick()
        server.stop()
    finally:
        coordinator.close()


def _end_at_once(sentence: str) -> NoReturn:
    """Exit at once: another coordinator leads, and this process's supervisor restarts it."""
    _log.error("lead_lost", sentence=sentence)
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()
    os._exit(1)


def _replicas(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of replicas; write 1 for a primary with one replica")
    return int(text)


def _lease(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not _SHORTEST_LEASE_SECONDS <= seconds <= _LONGEST_LEASE_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is no lease; write a number of seconds from 1 to 3600")
    return seconds
