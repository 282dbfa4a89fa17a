"""`python -m tests.chaos.partitions`: wires between processes are cut, in network namespaces. Needs root.

    python -m tests.chaos.partitions                                   every wire, in an order made from --seed
    python -m tests.chaos.partitions --only cut/shard-0/agent-1/there  one way of one wire
    python -m tests.chaos.partitions --list                            names only

Without root, or without the tools for namespaces, nothing is tried, and that is said aloud; exit status 0 then.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import HetpipeError
from hetpipe.wire.channel import KEEPALIVE_SECONDS, KEEPALIVE_TIMEOUT_SECONDS
from tests.chaos.cluster import COORDINATOR, LEASE_SECONDS, REDIS, Cluster, Layout, Place
from tests.chaos.command import Command
from tests.chaos.outcome import Outcome
from tests.chaos.sequence import SURVIVE, Play
from tests.chaos.trial import Trial
from tests.chaos.watch import Watch
from tests.chaos.wires import Damage, Wire, all_wires
from tests.support.network_namespaces import Network, why_not, why_not_slow

#: Longer than every lease here, and than it takes to notice that an open connection is silent.
CUT_SECONDS = max(LEASE_SECONDS, KEEPALIVE_SECONDS + KEEPALIVE_TIMEOUT_SECONDS) + 2.0

#: How long connections are answered with resets.
RESET_SECONDS = 1.0

#: What a slow host may send per second: a fraction of what the job has it send.
SLOW_KILOBITS = 500

#: How long an open call to a silent peer may stay open: what keepalive needs, and a little for the machine.
NOTICE_SECONDS = KEEPALIVE_SECONDS + KEEPALIVE_TIMEOUT_SECONDS + 1.5

#: CPU devices of each host.
DEVICES = (3, 2)

#: The first virtual worker has two stages on one host, with a link through shared memory; the one in the middle has one
#: on each, so that there is a link between the hosts.
WORKERS = {"stages": [[2, 2], [2, 2], [4]]}


class PartitionScene:
    """Clusters whose processes have a network namespace each."""

    @contextmanager
    def open(self, folder: Path) -> Iterator[tuple[Trial, Play[Wire]]]:
        """A cluster with a job, and what treats its wires."""
        shape = Layout(devices=DEVICES)
        keys = (COORDINATOR, REDIS, *shape.shards, *shape.agents)
        with Network("cluster", keys) as network:
            places = {key: _place(network, key) for key in keys}
            with Cluster(folder, Layout(devices=DEVICES, places=places)) as cluster:
                trial = Trial(cluster, folder / "run", survive=SURVIVE, workers=WORKERS)
                trial.wait_moving()
                check_memory(folder)
                yield trial, Breaker(cluster, trial, network).play


def check_memory(folder: Path) -> None:
    """Fail unless a link of the cluster's job goes through shared memory, by the logs of its stages."""
    lines = [line for path in folder.rglob("logs/*.log") for line in path.read_bytes().splitlines()]
    chosen = [line for line in lines if b'"transport_chosen"' in line and b'"link"' in line]
    assert any(b"shared memory" in line for line in chosen), f"no link goes through shared memory: {chosen}"


def _place(network: Network, key: str) -> Place:
    host = network[key]
    return Place(host=host.address, prefix=host.prefix, name=host.host_name)


class Breaker:
    """Treats the wires of one cluster."""

    def __init__(self, cluster: Cluster, trial: Trial, network: Network) -> None:
        self._cluster = cluster
        self._trial = trial
        self._network = network
        self._watch = Watch(cluster, trial)

    def play(self, wire: Wire) -> Outcome:
        """Do it, mend it, and wait until the job has got over it."""
        # Whose link breaks dies, and who cannot be heard is evicted: nobody is a bystander here.
        return self._watch.play(wire, self._hit, may_end=wire.may_end, may_leave={0, 1, 2})

    def _hit(self, wire: Wire) -> None:
        match wire.damage:
            case Damage.CUT:
                with self._network.cut(wire.first, wire.second, wire.direction):
                    SYSTEM_CLOCK.sleep(CUT_SECONDS)
            case Damage.RESET:
                with self._network.resetting(wire.first, wire.second):
                    SYSTEM_CLOCK.sleep(RESET_SECONDS)
            case Damage.LOSSY:
                with self._network.losing_some(wire.first, wire.second):
                    SYSTEM_CLOCK.sleep(LEASE_SECONDS + 2.0)
            case Damage.SLOW:
                with self._network.slow(wire.first, kilobits_per_second=SLOW_KILOBITS):
                    SYSTEM_CLOCK.sleep(LEASE_SECONDS + 2.0)
            case Damage.SILENT_PEER:
                self._fall_silent(wire)

    def _fall_silent(self, wire: Wire) -> None:
        """A stream from here to the coordinator is open, and then nothing comes any more."""
        began, ended = threading.Event(), threading.Event()

        def follow() -> None:
            try:
                for _ in self._cluster.client.watch_clocks(self._trial.job_id):
                    began.set()
            except HetpipeError:
                ended.set()

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        assert began.wait(NOTICE_SECONDS), "the coordinator tells no clocks"
        with self._network.cut(wire.first, wire.second):
            assert ended.wait(NOTICE_SECONDS), f"a call to a silent peer was still open after {NOTICE_SECONDS} s"
        thread.join(NOTICE_SECONDS)


def main() -> int:
    """Treat the wires that were asked for; the exit status."""
    wires = all_wires()
    if reason := why_not():
        sys.stdout.write(f"NOT TESTED: {len(wires)} partitions and other faults of the network, because {reason}\n")
        return 0
    reason = why_not_slow()
    skipped = {wire.name: reason for wire in wires if reason and wire.damage is Damage.SLOW}
    tried = [wire for wire in wires if wire.name not in skipped]
    command = Command("tests.chaos.partitions", "What is survived of the network's faults.", tried, skipped)
    return command.run(PartitionScene())


if __name__ == "__main__":
    sys.exit(main())
