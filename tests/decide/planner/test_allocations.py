"""Which devices NP, ED, HD and explicit give to which virtual worker."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hetpipe.decide.planner.allocation import equal_distribution, hybrid_distribution, node_partition
from hetpipe.decide.planner.allocation.exhaustive import every_grouping
from hetpipe.decide.planner.allocation.explicit import explicit
from hetpipe.decide.planner.jobs import Groups, Jobs
from hetpipe.decide.planner.options import PlanOptions
from hetpipe.errors import PlanError
from hetpipe.values.cluster import node_of
from hetpipe.values.ids import DeviceId
from tests.decide.planner.job_cases import PAPER_CLUSTER, chain, cluster_of, jobs_for, jobs_of, roomy
from tests.decide.planner.job_oracle import best_job, check_best, set_partitions
from tests.decide.planner.partition_cases import Shape, best_of_all, random_case


def mixes(jobs: Jobs, groups: Groups) -> list[str]:
    """The types of each virtual worker, as the paper writes them."""
    return ["".join(sorted((jobs.devices[device] for device in group), key="VRGQ".index)) for group in groups]


def judge(nodes: list[str]) -> Jobs:
    return jobs_for(chain([3.0] * 16), cluster_of(nodes))


class TestThePaperSCluster:
    """Table 3."""

    jobs = jobs_for(chain([3.0] * 16), PAPER_CLUSTER)

    def test_np(self) -> None:
        assert mixes(self.jobs, node_partition.groups(self.jobs)) == ["VVVV", "RRRR", "GGGG", "QQQQ"]

    def test_ed(self) -> None:
        for groups in equal_distribution.groupings(self.jobs):
            assert mixes(self.jobs, groups) == ["VRGQ"] * 4

    def test_hd(self) -> None:
        assert mixes(self.jobs, hybrid_distribution.groups(self.jobs)) == ["VVQQ", "VVQQ", "RRGG", "RRGG"]

    def test_ed_local_sends_no_parameters_between_nodes(self) -> None:
        jobs = jobs_for(chain([3.0] * 16), PAPER_CLUSTER, PlanOptions(placement="ed_local", minibatches_per_wave=4))
        default = jobs_for(chain([3.0] * 16), PAPER_CLUSTER, PlanOptions(minibatches_per_wave=4))

        local, dealt = equal_distribution.equal_distribution(jobs), equal_distribution.equal_distribution(default)

        cuts = 3 * 2 * jobs.costs.cut_bytes[1]  # each pipeline crosses nodes three times, forward and back
        assert local.rate.cross_node_bytes_per_minibatch == cuts
        # A stage has 1/4 of the parameters, of which 1/4 are dealt to its own node; pushed and pulled once per 4.
        assert dealt.rate.cross_node_bytes_per_minibatch == cuts + 2 * 3 / 4 * jobs.costs.parameter_bytes[-1] / 4

    @pytest.mark.parametrize("policy", [node_partition.node_partition, hybrid_distribution.hybrid_distribution])
    def test_only_ed_can_be_local(self, policy: object) -> None:
        jobs = jobs_for(chain([3.0] * 16), PAPER_CLUSTER, PlanOptions(placement="ed_local"))

        with pytest.raises(PlanError, match="use --allocation ED"):
            policy(jobs)  # type: ignore[operator]


@given(
    speeds=st.lists(st.floats(0.1, 10), min_size=4, max_size=4, unique=True).map(lambda all_: sorted(all_)[::-1]),
    gib=st.lists(st.integers(4, 48), min_size=4, max_size=4),
)
def test_hd_pairs_strong_with_weak_whatever_the_speeds_and_memory(speeds: list[float], gib: list[int]) -> None:
    assume(all(faster > 1.001 * slower for faster, slower in pairwise(speeds)))
    profile = chain([3.0] * 4, dict(zip("VRGQ", speeds, strict=True)))
    jobs = jobs_for(profile, cluster_of(["QQQQ", "VVVV", "GGGG", "RRRR"], gib=dict(zip("VRGQ", gib, strict=True))))

    assert Counter(mixes(jobs, hybrid_distribution.groups(jobs))) == {"VVQQ": 2, "RRGG": 2}


def test_hd_of_equally_fast_types_evens_out_memory() -> None:
    profile = chain([3.0] * 4, dict.fromkeys("VRGQ", 1.0))
    jobs = jobs_for(profile, cluster_of(["V", "R", "G", "Q"], gib={"V": 40, "R": 10, "G": 30, "Q": 20}))

    assert set(mixes(jobs, hybrid_distribution.groups(jobs))) == {"VR", "GQ"}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (["VVVV"], ["VVVV"]),
        (["VV", "RR", "GG"], ["VG", "VG", "RR"]),
        (["VVVV", "VVVV", "QQQQ", "QQQQ"], ["VVQQ"] * 4),
        (["VVV", "QQ"], ["VVVQQ"]),
    ],
)
def test_hd_of_other_clusters(nodes: list[str], expected: list[str]) -> None:
    jobs = judge(nodes)

    assert Counter(mixes(jobs, hybrid_distribution.groups(jobs))) == Counter(expected)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (["VV", "QQ"], [["VQ"] * 2]),
        (["VVVV", "QQ"], [["VVQ"] * 2]),
        (["VQ", "VQ"], [["VVQQ"], ["VQ"] * 2]),
        (["VV", "VV", "QQ", "QQ"], [["VVQQ"] * 2, ["VQ"] * 4]),
    ],
)
def test_ed_of_other_clusters(nodes: list[str], expected: list[list[str]]) -> None:
    jobs = judge(nodes)

    assert [mixes(jobs, groups) for groups in equal_distribution.groupings(jobs)] == expected


def test_ed_of_many_devices_that_cannot_be_divided() -> None:
    with pytest.raises(PlanError, match="17 devices cannot be divided into equal virtual workers"):
        equal_distribution.equal_distribution(judge(["V" * 8, "Q" * 9]))


def test_ed_of_mixed_nodes_stays_within_them() -> None:
    jobs = judge(["VQ", "VQ"])

    by_type = equal_distribution.groupings(jobs)[1]

    assert [{node_of(device) for device in group} for group in by_type] == [{"n0"}, {"n1"}]


@settings(max_examples=40)
@given(st.integers(0, 10**9), st.sampled_from([1.0, 10.0, 50.0]))
def test_partitions_of_given_groups_are_the_best_for_the_job(seed: int, divisor: float) -> None:
    shape = Shape(num_layers=(2, 5), num_devices=(2, 4), num_nodes=(1, 3), zeros=False)
    case = roomy(random_case(seed, shape), network_divisor=divisor)
    jobs = jobs_of(case, any_n=True)
    groups = node_partition.groups(jobs)
    best = best_job(case, groupings=[groups], any_n=True)
    assume(best > 0)

    check_best(node_partition.node_partition(jobs), best)


class TestExplicit:
    """The user names the devices."""

    @settings(max_examples=40)
    @given(st.integers(0, 10**9))
    def test_every_worker_has_its_best_partition_over_all_its_devices(self, seed: int) -> None:
        case = roomy(random_case(seed, Shape(num_layers=(2, 6), num_devices=(1, 4), num_nodes=(1, 3), zeros=False)))
        devices = tuple(case.cluster.devices)
        least = best_of_all(case)
        assume(least is not None and (case.weights in ("wave", "flush") or case.minibatches_per_wave >= len(devices)))
        options = jobs_of(case).options

        plan = explicit(jobs_for(case.profile, case.cluster, replaced(options, (devices[::-1],))))

        assert least is not None
        assert plan.bottleneck_ticks >= least
        check_best(plan, best_job(case, groupings=[[devices]], any_n=False))
        assert {stage.device for stage in plan.workers[0].stages} == set(devices)

    @pytest.mark.parametrize(
        ("workers", "message"),
        [
            (None, "give --workers"),
            ((("n0/0",), ()), "give --workers"),
            ((("n0/0", "n9/0"),), "names the unknown device n9/0; did you mean `n0/0`"),
            ((("n0/0",), ("n0/0",)), "names the device n0/0 2 times"),
        ],
    )
    def test_mistakes(self, workers: tuple[tuple[str, ...], ...] | None, message: str) -> None:
        ids = None if workers is None else tuple(tuple(map(DeviceId, group)) for group in workers)

        with pytest.raises(PlanError, match=message):
            explicit(jobs_for(chain([1.0] * 4), PAPER_CLUSTER, replaced(PlanOptions(), ids)))


def replaced(options: PlanOptions, workers: tuple[tuple[DeviceId, ...], ...] | None) -> PlanOptions:
    return replace(options, allocation="explicit", workers=workers)


@pytest.mark.parametrize("nodes", [["V"], ["VV", "V"], ["VQ", "VVQ"], ["V", "R", "G", "Q"], ["VVVVV"]])
def test_every_grouping_comes_once(nodes: list[str]) -> None:
    devices = cluster_of(nodes).devices

    def signature(groups: Groups) -> tuple[tuple[tuple[str, str], ...], ...]:
        """What groups look like if devices of one type on one node look alike."""
        return tuple(sorted(tuple(sorted((node_of(d), devices[d]) for d in group)) for group in groups))

    found = [signature(groups) for groups in every_grouping(devices)]
    expected = {signature(groups) for groups in set_partitions(list(devices)) if groups}  # type: ignore[arg-type]

    assert len(found) == len(set(found))
    assert set(found) == expected
