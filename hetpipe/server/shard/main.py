"""`hetpipe serve parameter-server`: one shard process; usually one per node. It never imports user code."""

from __future__ import annotations

import argparse
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import MemberReplaced
from hetpipe.observe.metrics_endpoint import metrics_endpoint
from hetpipe.observe.rpc_counters import RPC_COUNTERS
from hetpipe.roots import Roots, add_root_options, roots_of
from hetpipe.server.member_session import Hooks, MemberSession
from hetpipe.server.runtime import (
    Shutdown,
    add_listening_options,
    advertised_host,
    announce_ready,
    new_parser,
    open_tls,
    own_name,
    run_service,
    server_config,
    started,
)
from hetpipe.server.shard.disk_watch import DiskWatch
from hetpipe.server.shard.job_storage import StateOptions
from hetpipe.server.shard.readings import readings
from hetpipe.server.shard.run_history import HistoryFactory, file_history
from hetpipe.server.shard.server import ShardServer, machine_memory_bytes
from hetpipe.values.addresses import join_address, split_address
from hetpipe.values.identity import Role
from hetpipe.values.ids import JobId, ShardIndex
from hetpipe.values.members import MemberId, MemberInfo, MemberRole
from hetpipe.values.requests import PullHeader, PushHeader, PushReply
from hetpipe.weights.allocator import settle_memory
from hetpipe.wire.call import Chunk
from hetpipe.wire.coordinator_client import CoordinatorClient
from hetpipe.wire.limits import Limits
from hetpipe.wire.listening import is_loopback
from hetpipe.wire.server import Server
from hetpipe.wire.serving import Context
from hetpipe.wire.tls import Tls

#: Threads for calls that move tensors or decide; followers of the log occupy none. Without TLS, a whole run on one
#: machine may use seven eighths of them.
CALL_THREADS = 96

#: Calls that run or wait for a thread: the stages of a large job report a wave at about the same time.
CONCURRENT_CALLS = 2 * CALL_THREADS + 1_024

#: Share of the machine's memory for all concurrent uploads.
_UPLOAD_SHARE = 0.5

#: Timeout for the first contact with the coordinator.
_START_SECONDS = 30.0


class DelayedShardServer(ShardServer):
    """Emulates a slow network: pushes and pulls start after a random delay."""

    def __init__(
        self,
        history: HistoryFactory,
        longest_seconds: float,
        *,
        seed: int,
        tls: Tls | None,
        state: StateOptions,
        roots: Roots,
    ) -> None:
        super().__init__(history, tls=tls, state=state, roots=roots)
        self._longest_seconds = longest_seconds
        self._random = random.Random(seed)  # noqa: S311 - emulation, not a secret

    def push(self, header: PushHeader, chunks: Iterable[Chunk], context: Context) -> PushReply:
        """Implement `ShardServer.push`."""
        SYSTEM_CLOCK.sleep(self._random.random() * self._longest_seconds)
        return super().push(header, chunks, context)

    def pull(self, header: PullHeader, context: Context) -> Iterator[Chunk]:
        """Implement `ShardServer.pull`."""
        SYSTEM_CLOCK.sleep(self._random.random() * self._longest_seconds)
        yield from super().pull(header, context)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until terminated; return the exit status."""
    parser = new_parser("parameter-server", "One parameter-server shard.")
    add_listening_options(parser)
    parser.add_argument("--coordinator", metavar="HOST:PORT", required=True, help="the coordinator to register with")
    parser.add_argument("--index", type=int, metavar="I", help="position among the shards (default: by registration)")
    parser.add_argument(
        "--threads",
        type=int,
        default=min(4, os.cpu_count() or 1),
        help="threads for adding updates (default: CPUs, at most 4)",
    )
    parser.add_argument(
        "--emulate-delay",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="delay each push and pull by a random time up to this, to emulate a slow network (%(default)s)",
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="DIR",
        help="persist pushes, weights and decisions in this folder, and recover from it; for this process and its "
        "successors only (default: state/shard-I in the folder of each run, which a restarted process does not search)",
    )
    parser.add_argument(
        "--fsync",
        action="store_true",
        help="fsync before every acknowledgement, so that acknowledged state survives a power cut as well",
    )
    add_root_options(parser, with_code=False)
    options = parser.parse_args(arguments)
    return run_service("parameter_server", options, lambda shutdown: _serve(options, shutdown))


def _serve(options: argparse.Namespace, shutdown: Shutdown) -> None:
    settle_memory(one_heap=False)
    torch.set_num_threads(options.threads)
    tls = open_tls(options, options.host)
    index = "" if options.index is None else str(options.index)
    name = own_name(options, tls, Role.PARAMETER_SERVER, option="--index", given=index)
    host = advertised_host(options.host, options.advertise)
    history = file_history(host, os.getpid())
    state = StateOptions(root=options.state, fsync=options.fsync)
    roots = roots_of(options, is_reached=not is_loopback(options.host))
    if options.emulate_delay:
        seed = options.index or 0
        shards: ShardServer = DelayedShardServer(
            history, options.emulate_delay, seed=seed, tls=tls, state=state, roots=roots
        )
    else:
        shards = ShardServer(history, tls=tls, state=state, roots=roots)
    limits = Limits(bytes_in_total=int(_UPLOAD_SHARE * machine_memory_bytes()))
    config = server_config(options, tls, num_threads=CALL_THREADS, max_concurrent_calls=CONCURRENT_CALLS)
    server = Server(replace(config, limits=limits))
    # Recovery may take minutes: not ready, and alive.
    server.stand_by()
    try:
        shards.recover()
    except BaseException:
        server.stop()
        raise
    shards.add_to(server)
    server.on_stop(shards.stop)
    _, port = split_address(server.start())
    address = join_address(host, port)
    membership = _membership(
        options, shards, tls, name or address, host, address, on_replaced=lambda _replaced: shutdown.request()
    )
    shards.on_condition(membership.send_soon)
    DiskWatch(shards).start()
    try:
        shutdown.on_request(membership.cancel_start)
        sources = (RPC_COUNTERS.readings, lambda: readings(shards, silent_seconds=membership.silent_seconds))
        with metrics_endpoint(options.host, options.metrics_port, "parameter_server", *sources):
            # Recovered jobs are served even without a coordinator.
            wait_seconds = math.inf if shards.jobs() else _START_SECONDS
            if not started(partial(membership.start, wait_seconds=wait_seconds), shutdown):
                return
            announce_ready("parameter_server", address)
            shutdown.wait()
            membership.close()
    finally:
        server.stop()


def _membership(
    options: argparse.Namespace,
    shards: ShardServer,
    tls: Tls | None,
    name: str,
    host: str,
    address: str,
    *,
    on_replaced: Callable[[MemberReplaced], None],
) -> MemberSession:
    info = MemberInfo(
        MemberRole.PARAMETER_SERVER,
        MemberId(f"parameter-server-{name}"),
        host,
        os.getpid(),
        address=address,
        shard_index=ShardIndex(int(name)) if name.isdigit() else None,
    )

    def release(jobs: Sequence[JobId]) -> None:
        for job in jobs:
            shards.release(job)

    hooks = Hooks(
        clocks=shards.snapshots,
        jobs=shards.jobs,
        lost=shards.lost_jobs,
        conditions=shards.conditions,
        on_ended_jobs=release,
        newest_info=lambda info: replace(info, highest_term=shards.highest_term),
        on_replaced=on_replaced,
    )
    client = CoordinatorClient(options.coordinator, tls=tls)
    return MemberSession(client, info, hooks=hooks, fences=shards.fence)
