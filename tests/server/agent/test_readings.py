"""What an agent and a stage process tell Prometheus."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.observe.metric_names import families_of
from hetpipe.observe.readings import Reading, sorted_by_family
from hetpipe.pipeline.setup import StageIdentity
from hetpipe.server.agent.agent import Agent, AgentConfig
from hetpipe.server.agent.children import LINK_PORT, METRICS_PORT, Children, Programs
from hetpipe.server.agent.devices import discover_devices
from hetpipe.server.agent.readings import readings
from hetpipe.server.agent.stage_readings import StageReadings
from hetpipe.values.commands import ChildExit
from hetpipe.values.ids import Incarnation, JobId, StageIndex, VirtualWorkerIndex
from hetpipe.values.run import CacheUse, StageReady
from tests.server.agent.programs import environment
from tests.server.agent.test_children import Bench
from tests.server.coordinator.builders import progress

IDENTITY = StageIdentity(VirtualWorkerIndex(1), StageIndex(2), Incarnation(0), 3)


def stage(identity: StageIdentity = IDENTITY) -> StageReadings:
    told = StageReadings(JobId("j"), identity)
    told.observe(StageReady(7))
    return told


def read(told: StageReadings) -> dict[str, object]:
    found = list(told.readings())
    assert {reading.labels for reading in found} <= {("j", 1, 2), ("j", 1, 1)}
    return {reading.name.removeprefix("hetpipe_stage_"): reading.value for reading in found}


class TestStage:
    def test_nothing_before_the_first_report(self) -> None:
        assert read(stage()) == {}

    def test_the_newest_report_counts(self) -> None:
        told = stage()
        told.observe(progress(samples=8, clock=1, loss=2.0))
        told.observe(progress(samples=16, clock=2, loss=float("inf"), pushed_bytes=64, waiting_seconds=0.5))
        found = read(told)
        assert (found["samples_total"], found["waves_total"], found["loss"]) == (16, 2, float("inf"))
        assert (found["pushed_bytes_total"], found["waiting_seconds_total"]) == (64, 0.5)
        assert {"gradient_norm", "learning_rate"} & found.keys() == set()

    def test_only_the_last_stage_has_losses(self) -> None:
        told = stage(replace(IDENTITY, stage=StageIndex(1)))
        told.observe(progress())
        assert {"samples_total", "loss", "waves_total"} & read(told).keys() == set()

    def test_every_metric_of_the_list_is_told(self) -> None:
        told = stage()
        told.observe(
            progress(
                clock=1,
                loss=1.0,
                gradient_norm=1.0,
                learning_rate=0.1,
                loss_scale=4.0,
                skipped_updates=1,
                cache=CacheUse(1, 2, 3, 4, "full"),
            )
        )
        found = sorted_by_family(told.readings(), "stage")
        assert {family.name for family in found} == {family.name for family in families_of("stage")} - {"hetpipe_info"}


def test_an_agent_tells_its_devices_and_every_metric_of_the_list() -> None:
    agent = Agent(
        AgentConfig(
            node="n0",
            host="127.0.0.1",
            pid=os.getpid(),
            coordinator="127.0.0.1:1",
            devices=discover_devices("n0", num_cpu_devices=3),
            environment={},
        )
    )
    found = sorted_by_family(readings(agent), "agent")
    values = [reading for group in found.values() for reading in group]
    assert Reading("hetpipe_devices", 3, ("cpu",)) in values
    assert Reading("hetpipe_children", 0, ("stage",)) in values
    assert {family.name for family in found} == {family.name for family in families_of("agent")} - {"hetpipe_info"}


@pytest.mark.processes
class TestChildren:
    def test_they_are_counted(self, tmp_path: Path) -> None:
        bench = Bench(tmp_path)
        bench.start("done")
        bench.start("fail", stage=1)
        ends = [bench.next_exit(), bench.next_exit()]
        counts = bench.children.counts
        assert counts.started == {"stage": 2}
        assert counts.running == {"stage": 0, "inspection": 0, "link": 0}
        assert sorted(end.exit_code for end in ends) == [0, 3]
        assert counts.exited == {("stage", "ok"): 1, ("stage", "error"): 1}
        assert counts.later_lives == 0

    def test_a_stage_serves_on_the_ports_of_its_device(self, tmp_path: Path) -> None:
        show = tmp_path / "show.py"
        show.write_text(f"import os; print([os.environ.get(name) for name in {[METRICS_PORT, LINK_PORT]}])\n")
        bench = Bench(tmp_path)
        for first, expected in ((None, ["['', '']"] * 2), (7600, ["['7600', '7500']", "['7601', '7501']"])):
            bench.children = Children(
                send=bench.reports.put,
                environment={**environment(), METRICS_PORT: "1"},
                clock=SYSTEM_CLOCK,
                programs=Programs(stage=(sys.executable, "-S", "-E", str(show)), inspection=()),
                first_metrics_port=first,
                first_link_port=None if first is None else first - 100,
            )
            for stage_index in range(2):
                bench.start("done", stage=stage_index)
                assert isinstance(bench.next_exit(), ChildExit)
            shown = [(bench.run_dir / "logs" / f"vw-0-stage-{index}.out").read_text() for index in range(2)]
            assert [text.splitlines()[-1] for text in shown] == expected
