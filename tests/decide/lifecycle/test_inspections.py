"""Which agent inspects and measures what, in which order."""

from __future__ import annotations

import pytest

from hetpipe.decide.lifecycle.inspections import (
    Inspected,
    InspectionRequest,
    Inspections,
    is_to_measure,
    next_to_measure,
)
from hetpipe.errors import PlanError
from hetpipe.values.commands import InspectionPhase, InspectionResult, InspectionStep
from hetpipe.values.measurement import ProfileStep
from hetpipe.values.run import AgentInfo
from tests.decide.lifecycle.test_agents_cluster import agent, t4
from tests.job.test_job_cluster import CLUSTER, PROFILE
from tests.profiler.builders import measurement
from tests.server.coordinator.builders import BASE, JOB_ID, agent_info, job, model

CPUS = agent_info("n0", devices=2)
MIXED = agent("n1", t4("n1/0"), t4("n1/1"), *agent_info("n1", devices=3).devices[2:])
GPU = agent("n2", t4("n2/0"))
ALL = (CPUS, MIXED, GPU)


@pytest.mark.parametrize(
    ("agents", "asked", "measured", "expected"),
    [
        (ALL, 0, (), (0, ("cpu",))),
        (ALL, 1, ("cpu",), (1, ("T4",))),
        (ALL, 2, ("cpu", "T4"), None),
        ((MIXED, CPUS, GPU), 0, (), (0, ("T4", "cpu"))),
        ((MIXED, CPUS, GPU), 1, ("T4", "cpu"), None),
        ((CPUS, agent_info("n9"), GPU), 1, ("cpu",), (2, ("T4",))),
        ((CPUS,), 0, ("cpu",), None),
    ],
)
def test_every_type_is_measured_once_by_the_first_that_has_it(
    agents: tuple[AgentInfo, ...], asked: int, measured: tuple[str, ...], expected: tuple[int, tuple[str, ...]] | None
) -> None:
    assert next_to_measure(agents, asked=asked, measured=measured) == expected


def test_an_agent_that_does_not_find_its_own_devices_is_named() -> None:
    with pytest.raises(PlanError, match=r"agent n1 on n1.host registered devices of type T4 but found none"):
        next_to_measure(ALL, asked=2, measured=("cpu",))


def test_one_after_the_other_and_the_model_from_the_first() -> None:
    inspections = Inspections((CPUS, agent_info("n9"), GPU), to_measure=True)
    assert inspections.next() == InspectionRequest(CPUS, with_model=True, measure=("cpu",))
    inspections.add(InspectionResult(JOB_ID, model(), measurements=(measurement("cpu"),)))
    assert inspections.next() == InspectionRequest(GPU, with_model=False, measure=("T4",))
    inspections.add(InspectionResult(JOB_ID, None, measurements=(measurement("T4"),)))
    assert inspections.next() is None
    assert inspections.inspected == Inspected(model(), (measurement("cpu"), measurement("T4")))


def test_without_need_of_a_profile_one_agent_reports_the_model() -> None:
    inspections = Inspections(ALL, to_measure=False)
    assert inspections.next() == InspectionRequest(CPUS, with_model=True, measure=())
    inspections.add(InspectionResult(JOB_ID, model()))
    assert inspections.next() is None
    assert inspections.inspected == Inspected(model())


def test_a_model_that_was_reported_with_the_submission_is_not_inspected_again() -> None:
    inspections = Inspections(ALL, to_measure=False, model=model())
    assert inspections.next() is None
    assert inspections.inspected == Inspected(model())


def test_a_model_that_was_reported_with_the_submission_is_still_measured() -> None:
    inspections = Inspections((CPUS, GPU), to_measure=True, model=model())
    assert inspections.next() == InspectionRequest(CPUS, with_model=False, measure=("cpu",))
    inspections.add(InspectionResult(JOB_ID, None, measurements=(measurement("cpu"),)))
    assert inspections.next() == InspectionRequest(GPU, with_model=False, measure=("T4",))
    inspections.add(InspectionResult(JOB_ID, None, measurements=(measurement("T4"),)))
    assert inspections.next() is None
    assert inspections.inspected == Inspected(model(), (measurement("cpu"), measurement("T4")))


def test_who_is_waited_for() -> None:
    inspections = Inspections((CPUS, GPU), to_measure=True)
    inspections.next()
    assert inspections.awaited == "agent n0 on n0.host to import and inspect the model"
    inspections.on_progress(InspectionPhase(JOB_ID, "importing torch", 42.4))
    assert inspections.awaited == (
        "agent n0 on n0.host to import and inspect the model, which is importing torch (42 s)"
    )
    inspections.on_progress(InspectionStep(JOB_ID, ProfileStep("cpu", "head", 2, 8)))
    assert inspections.awaited == "agent n0 on n0.host, which is measuring the model on cpu: layer 3 of 8 (head)"
    inspections.add(InspectionResult(JOB_ID, model(), measurements=(measurement("cpu"),)))
    inspections.next()
    assert inspections.awaited == "agent n2 on n2.host to import and inspect the model"


@pytest.mark.parametrize(
    ("workers", "cluster", "expected"),
    [
        ({"stages": 2}, {}, False),
        ({}, {}, True),
        ({}, {"file": CLUSTER}, True),
        ({}, {"profile": PROFILE}, False),
        ({"stages": 2}, {"file": CLUSTER, "emulate": True}, True),
        ({"stages": 2}, {"file": CLUSTER, "profile": PROFILE, "emulate": True}, False),
    ],
)
def test_which_jobs_need_a_measurement(workers: dict[str, int], cluster: dict[str, object], expected: object) -> None:
    assert is_to_measure(type(job())(**{**BASE, "workers": workers, "cluster": cluster})) is expected
