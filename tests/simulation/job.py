"""A job, with what everybody of it looks up all the time."""

from __future__ import annotations

from hetpipe.decide.sync.decision_log import LogConfig
from hetpipe.values.ids import Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex, Wave
from hetpipe.values.plan import SlicePlan
from hetpipe.values.requests import PushHeader, Requester, SliceHeader
from tests.decide.sync.scenario import JOB, TERM, Scenario, slice_header


def slices_of(scenario: Scenario) -> dict[int, tuple[SlicePlan, ...]]:
    """What each shard holds."""
    return {shard: scenario.slices_of_shard(shard) for shard in range(scenario.num_shards)}


class Job:
    """A scenario, and what follows from it."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        fsync: bool,
        name: tuple[JobId, Term] = (JOB, TERM),
        log_config: LogConfig | None = None,
    ) -> None:
        """A job of `scenario`; `log_config`: the one that a coordinator has sent, should there be one."""
        self.scenario = scenario
        self.id, self.term = name
        self.log_config = log_config or scenario.log_config()
        self.members = self.log_config.membership.members
        self.progress = self.log_config.progress
        self.fsync = fsync
        self.n, self.d, self.sync = scenario.n, scenario.d, scenario.sync
        self.weights, self.deterministic = scenario.weights, scenario.deterministic
        self.data = scenario.data
        self.slices = slices_of(scenario)
        self._headers: dict[tuple[int, int, int], tuple[SliceHeader, ...]] = {}

    def headers(self, num_stages: int, stage: int, shard: int) -> tuple[SliceHeader, ...]:
        """What a stage holds of a shard: layer l belongs to stage l, the last stage takes the rest."""
        key = (num_stages, stage, shard)
        found = self._headers.get(key)
        if found is None:
            mine = (s for s in self.slices[shard] if min(s.layer, num_stages - 1) == stage)
            found = self._headers[key] = tuple(slice_header(s) for s in mine)
        return found


def push_header(requester: Requester, wave: int | None, slices: tuple[SliceHeader, ...]) -> PushHeader:
    """A push of `slices`."""
    return PushHeader(requester, None if wave is None else Wave(wave), slices)


def requester(job: JobId, vw: int, incarnation: int, stage: int, term: int) -> Requester:
    """How a stage names itself."""
    return Requester(job, Term(term), VirtualWorkerIndex(vw), Incarnation(incarnation), StageIndex(stage))
