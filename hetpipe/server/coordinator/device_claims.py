"""Allocation of devices and parameter servers: free ones, and offers to queued jobs (`job_queue.py`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import replace

from hetpipe.decide.lifecycle.exchange import ResourcesOffered
from hetpipe.decide.lifecycle.job_queue import ClusterView, in_turn, turns
from hetpipe.decide.lifecycle.orphans import Orphans
from hetpipe.decide.lifecycle.registry import Registry
from hetpipe.server.coordinator.job_hosts import Context, JobHosts
from hetpipe.values.link_measurement import still_valid
from hetpipe.values.members import MemberInfo, MemberRole
from hetpipe.values.run import AgentInfo


class DeviceClaims:
    """Claims of all jobs of one coordinator. Every method is called under the lock."""

    def __init__(self, context: Context, jobs: JobHosts, registry: Registry, orphans: Orphans) -> None:
        self._context = context
        self._jobs = jobs
        self._registry = registry
        self._orphans = orphans
        #: When this coordinator began to lead, in monotonic seconds.
        self._began = context.clock.monotonic()

    def offer(self) -> None:
        """Offer free members to queued jobs, in the order of the queue.

        Jobs about which reports may still arrive get none.
        """
        waiting = [host for host in self._jobs if host.machine.state.is_queued]
        waiting = in_turn((host for host in waiting if host.job_id not in self._orphans), lambda host: host.machine.job)
        while waiting:
            cluster = self.view()
            places = turns([(host.job_id, host.machine.job) for host in waiting], cluster)
            for host, turn in zip(waiting, places, strict=True):
                self._jobs.feed(host, ResourcesOffered(cluster, turn))
                if not host.machine.state.is_queued:
                    # It has claimed its members; the rest is offered to the others.
                    break
            else:
                return
            waiting = [host for host in waiting if host.machine.state.is_queued]

    def view(self) -> ClusterView:
        """The free members.

        A parameter server may serve a running job: it counts only after it has reported its jobs. Members used by
        orphans are not known.
        """
        now = self._context.clock.monotonic()
        users = {
            device.device: host.job_id
            for host in self._jobs
            if not host.machine.is_settled(now=now)
            for agent in host.machine.agents
            for device in agent.devices
        }
        orphans = self._orphans
        #: Their devices may be in use by a job that only they can report.
        reporters = {
            member for orphan in orphans if not orphans.is_credible(orphan, now=now) for member in orphan.reporters
        }
        members, shards = (
            [member for member in self._registry.of_role(role) if member.id not in reporters]
            for role in (MemberRole.AGENT, MemberRole.PARAMETER_SERVER)
        )
        agents = [self.known_agent(member) for member in members if not self._registry.departs(member.id)]
        devices = [device.device for agent in agents for device in agent.devices]
        held = Counter(users[device] for device in devices if device in users)
        return ClusterView(
            agents=tuple(_without(agent, users) for agent in agents),
            busy_devices=held.total(),
            shards=tuple(shard for shard in shards if self._registry.has_reported(shard.id)),
            unled=tuple(orphan.job_id for orphan in orphans if orphans.is_credible(orphan, now=now)),
            held=tuple(held.items()),
            is_settled=now - self._began >= self._context.patience.echo_seconds,
        )

    def known_agent(self, member: MemberInfo) -> AgentInfo:
        """An agent, with valid measurements of its links."""
        return replace(member.agent_info, links=still_valid(member.links, now=self._context.clock.wall()))


def _without(agent: AgentInfo, busy: Container[str]) -> AgentInfo:
    return replace(agent, devices=tuple(device for device in agent.devices if device.device not in busy))
