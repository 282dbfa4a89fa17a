"""Terms that members report: accepted as far as there can be such, wherever a coordinator would go on from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.errors import ProtocolViolation
from hetpipe.server.coordinator.control_numbers import Terms
from hetpipe.storage.memory_store import MemoryStore
from hetpipe.values.bounds import MAX_COUNT
from hetpipe.values.counters import MAX_REPORTED_AHEAD, TERMS
from hetpipe.values.events import JobState
from hetpipe.values.ids import Term
from hetpipe.values.members import MemberId, MemberInfo, MemberRole
from tests.server.coordinator.builders import JOB_ID, clocks, shard_member
from tests.server.coordinator.fakes import Cluster
from tests.server.coordinator.succession import Succession, seen

FAR = (MAX_REPORTED_AHEAD + 1, TERMS.largest_reported + 1, MAX_COUNT - 1)


@pytest.mark.parametrize("term", FAR)
def test_a_registration_is_refused_and_no_job_gets_near_it(tmp_path: Path, term: int) -> None:
    cluster = Cluster(tmp_path)
    with pytest.raises(ProtocolViolation, match=f"reports a term of {term}; this coordinator's is 0"):
        cluster.join(shard_member(9, term=term))
    cluster.usual()
    assert len(cluster.coordinator.members()) == 4
    assert cluster.store.next_term(above=Term(0)) == 1


def test_what_a_wiped_store_has_forgotten_is_accepted(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.join(shard_member(0, term=MAX_REPORTED_AHEAD))
    assert len(cluster.coordinator.members()) == 1


def test_what_the_store_has_given_meanwhile_is_known() -> None:
    store = MemoryStore()
    terms = Terms(store)
    store.next_term(above=Term(3 * MAX_REPORTED_AHEAD))
    terms.meet(shard_member(0, term=3 * MAX_REPORTED_AHEAD + 1))
    terms.meet(shard_member(0, term=4 * MAX_REPORTED_AHEAD))


def test_a_worker_that_is_only_listed_says_nothing() -> None:
    Terms(MemoryStore()).meet(MemberInfo(MemberRole.WORKER, MemberId("w"), "h", 1, highest_term=Term(MAX_COUNT - 1)))


@pytest.mark.parametrize("term", FAR)
def test_the_clocks_of_a_heartbeat_make_nobody_the_newest_clock_shard(tmp_path: Path, term: int) -> None:
    cluster = Cluster(tmp_path).usual()
    with pytest.raises(ProtocolViolation, match=f"reports a term of {term}"):
        cluster.beat(shard_member(1).id, clocks={JOB_ID: replace(clocks(3, 2), term=Term(term))})
    assert not cluster.coordinator.is_orphan(JOB_ID)
    cluster.beat(shard_member(1).id)


class TestAdoption:
    """A clock shard's word of a job is bounded as its registration is: the next term would go beyond it."""

    @pytest.mark.parametrize("term", FAR[1:])
    def test_a_job_of_a_term_out_of_range_is_not_led(self, tmp_path: Path, term: int) -> None:
        succession = Succession(tmp_path)
        plan = replace(succession.run.plan, term=Term(term))
        succession.describe(run=replace(succession.run, plan=plan))
        self.given_up(succession, f"reports a term of {term}")

    def test_neither_is_one_of_an_incarnation_out_of_range(self, tmp_path: Path) -> None:
        succession = Succession(tmp_path)
        succession.describe(seen(0, MAX_COUNT - 1), seen(1))
        self.given_up(succession, f"incarnation {MAX_COUNT - 1} of virtual worker 0")

    def given_up(self, succession: Succession, sentence: str) -> None:
        succession.succeed()
        succession.cluster.wait(90.0)
        record = succession.coordinator.record(JOB_ID)
        assert record.state is JobState.FAILED
        assert sentence in record.failure
        assert succession.cluster.store.next_term(above=Term(0)) < 10
