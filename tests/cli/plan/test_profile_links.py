"""`hetpipe profile --links`: what it tells and writes, what plans make of it, and how it fails."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from hetpipe.cli.app import app
from hetpipe.cli.plan import link_profiling
from hetpipe.cli.plan.link_profiling import LinkProfileOptions, ProfiledLinks, cached_links, profile_links
from hetpipe.cli.plan.profile_links import links_sentences
from hetpipe.decide.lifecycle.known_cluster import known_links, stated_links
from hetpipe.decide.planner.assembly import profile_of
from hetpipe.decide.planner.costs import Costs
from hetpipe.decide.simulator.documents import costs_of as real_costs_of
from hetpipe.errors import DeadlineExceeded, JobFailed, PeerUnreachable
from hetpipe.runs.shell import Shell
from hetpipe.server.agent.devices import discover_devices
from hetpipe.values.cluster import Cluster, Links, LinkSpec
from hetpipe.values.document import parse_document, read_document, to_json
from hetpipe.values.link_measurement import VALID_SECONDS, LinksProgress, MeasuredLinks
from hetpipe.values.measurement import ProfileStep
from hetpipe.values.members import Member
from hetpipe.values.plan_document import PlanDocument
from hetpipe.values.profile import Profile
from tests.cli.fakes import FakeCoordinator, small_job
from tests.cli.plan.test_profile import fake_program
from tests.decide.lifecycle.test_known_links import NOW, copies, link
from tests.profiler.builders import layer, measurement
from tests.server.coordinator.builders import agent_member, shard_member
from tests.support.fake_clock import FakeClock

NODE = "here"
MEASURED = MeasuredLinks(links=(link(NODE, NODE, 7.5e8, age=7384.0),), copies=(copies(NODE, 1e9, method="memcpy"),))


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("socket.gethostname", lambda: NODE)


def shell(now: float = NOW) -> Shell:
    return Shell(
        clock=FakeClock(wall=now),
        environment={"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(Path.cwd() / "cache")},
        current=Path.cwd(),
    )


def wish(body: str = "") -> LinkProfileOptions:
    return LinkProfileOptions(node=NODE, devices=discover_devices(NODE), program=fake_program(body))


def cache(measured: MeasuredLinks) -> None:
    link_profiling._cache(wish(), shell()).keep(measured)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["profile", *arguments], obj=shell())


def test_measured_links_are_told_written_and_valid_for_a_week() -> None:
    cache(MEASURED)
    result = invoke("--links", "--out", "c.yaml")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        "measured                       by      GB/s  latency µs  messages of       samples",
        "link within here               gloo    0.75         100  256 bytes, 4 MiB  20 or more",
        "memory of here to T4 and back  memcpy     1          10  256 bytes, 4 MiB  20 or more",
        "",
        "the slower of both directions; latency is half the round trip of small messages",
        "memcpy: without a GPU a copy stays in memory; stages on CPUs make none, and plans ignore it",
        "measured 2 h 03 min ago; measure again with --fresh",
        "written to c.yaml",
    ]
    found = read_document(Cluster, Path("c.yaml"))
    assert found.links.intra_node.bandwidth_bytes_per_second == 7.5e8
    assert found.links.intra_node.latency_seconds == 1e-4
    assert "intra_node was measured on 2023-11-14" in Path("c.yaml").read_text()
    assert cached_links(wish(), shell(NOW + VALID_SECONDS)).links == (), "the link is too old, the copies are not"


def test_the_json_line_has_the_cluster_and_what_was_measured() -> None:
    cache(MEASURED)
    answer = json.loads(invoke("--links", "--json").stdout)
    cluster = parse_document(Cluster, json.dumps(answer["cluster"]), what="the answer")
    assert cluster.links.intra_node.bandwidth_bytes_per_second == 7.5e8
    assert answer["measured"]["links"][0]["speed"]["large_bytes"] == 1 << 22
    assert answer["cached"]


def test_other_devices_or_another_name_are_measured_anew() -> None:
    cache(MEASURED)
    assert cached_links(wish(), shell()) == MEASURED
    assert cached_links(replace(wish(), node="there"), shell()) == MeasuredLinks()
    assert cached_links(replace(wish(), devices=()), shell()) == MeasuredLinks()


def test_options_for_a_model_are_refused() -> None:
    result = invoke("--links", "job.yaml", "--repeats", "3")
    assert (result.exit_code, result.stderr.strip()) == (
        2,
        "error: --links measures no model; leave out JOB, --repeats, or --links",
    )
    result = invoke()
    assert (result.exit_code, "name a job file, or give --links" in result.stderr) == (2, True)


def test_a_file_that_cannot_be_written() -> None:
    cache(MEASURED)
    result = invoke("--links", "--out", "nowhere/c.yaml")
    assert result.exit_code == 2
    assert "cannot write nowhere/c.yaml" in result.stderr


def plan() -> Result:
    Path("job.yaml").write_text(yaml.safe_dump(small_job().model_dump(mode="json", exclude_none=True)))
    profile = profile_of("tests.models:mlp32", 4, measured=[measurement("cpu", *[layer(str(i)) for i in range(5)])])
    Path("p.json").write_text(to_json(profile))
    return CliRunner().invoke(app, ["plan", "job.yaml", "--profile", "p.json"], obj=shell())


def test_a_plan_says_that_links_are_assumed_and_how_to_measure_them() -> None:
    result = plan()
    assert result.exit_code == 0, result.output
    assert "links: assumed within here; `hetpipe profile --links` measures those of a machine" in result.stdout


def test_a_plan_uses_the_links_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    cache(MEASURED)
    planned_with: list[LinkSpec] = []

    def costs_of(document: PlanDocument, profile: Profile, cluster: Cluster) -> Costs:
        planned_with.append(cluster.links.intra_node)
        return real_costs_of(document, profile, cluster)

    monkeypatch.setattr("hetpipe.cli.plan.plan.costs_of", costs_of)
    result = plan()
    assert result.exit_code == 0, result.output
    assert "links: measured within here, 2 h 03 min ago" in result.stdout
    (planned_link,) = planned_with
    assert planned_link.bandwidth_bytes_per_second == 7.5e8


def test_the_sources_of_links_are_told_apart() -> None:
    both = known_links([*"abcd"], MeasuredLinks(links=(link("a", "b", 1e9), link("a", "a", 1e9, age=60))), now=NOW)
    assert [sentence.partition(";")[0] for sentence in links_sentences(both, NOW)] == [
        "links: measured within a, between a and b, up to 1 min 00 s ago",
        "links: assumed within b, within c, within d and 5 more",
    ]
    assumed = known_links(["a"], MeasuredLinks(), now=NOW).links
    assert links_sentences(stated_links(assumed, ["a"]), NOW) == ("links: stated in the cluster file",)
    assert isinstance(assumed, Links)


class TestCluster:
    """`--coordinator`: agents measure the links between their nodes, and what is known of all of them is told."""

    def invoke(self, coordinator: FakeCoordinator, *arguments: str) -> Result:
        clock = FakeClock(wall=NOW, auto_advance=True)
        there = replace(shell(), clock=clock, open_coordinator=lambda _address, _tls: coordinator)
        return CliRunner().invoke(app, ["profile", "--links", "--coordinator", "c:7300", *arguments], obj=there)

    def cluster(self) -> FakeCoordinator:
        coordinator = FakeCoordinator()
        links = MeasuredLinks(links=(link("n0", "n1", 3e8, age=60.0),))
        infos = (replace(agent_member("n0", devices=1), links=links), agent_member("n1", devices=1), shard_member(0))
        coordinator.member_list = tuple(Member(info, order, 5.0) for order, info in enumerate(infos))
        coordinator.links_progress = [
            LinksProgress(done=0, total=1, awaited="agents n0 and n1"),
            LinksProgress(done=1, total=1, remark="the link between n0 and n2 was not measured: nobody came"),
        ]
        return coordinator

    def test_it_waits_for_the_agents_and_writes_the_cluster(self) -> None:
        coordinator = self.cluster()
        result = self.invoke(coordinator, "--out", "c.yaml", "--fresh")
        assert result.exit_code == 0, result.output
        assert [fresh for _, fresh in coordinator.surveys] == [True, True]
        assert len({request_id for request_id, _ in coordinator.surveys}) == 1
        told = result.stdout.splitlines()
        assert "link between n0 and n1  gloo   0.3         100  256 bytes, 4 MiB  20 or more" in told
        assert "the link between n0 and n2 was not measured: nobody came" in told
        assert "links: measured between n0 and n1, 1 min 00 s ago" in told
        found = read_document(Cluster, Path("c.yaml"))
        assert found.link("n0", "n1").bandwidth_bytes_per_second == 3e8
        assert [node.name for node in found.nodes] == ["n0", "n1"]
        assert "# links: measured between n0 and n1; assumed within n0, within n1" in Path("c.yaml").read_text()

    def test_agents_that_get_nowhere_are_not_waited_for_for_ever(self) -> None:
        coordinator = self.cluster()
        coordinator.links_progress = [LinksProgress(done=0, total=1, awaited="agents n0 and n1")] * 1_000
        result = self.invoke(coordinator)
        assert result.exit_code == 1
        assert "the coordinator at c:7300 has waited over 120 s for agents n0 and n1" in result.stderr

    def test_without_agents_there_are_no_links(self) -> None:
        coordinator = self.cluster()
        coordinator.member_list = ()
        result = self.invoke(coordinator)
        assert (result.exit_code, "no agent is registered with the coordinator at c:7300" in result.stderr) == (2, True)

    def test_it_is_for_links_alone(self) -> None:
        result = invoke("job.yaml", "--coordinator", "c:7300")
        assert (result.exit_code, "--coordinator is for links; add --links" in result.stderr) == (2, True)


# -- with processes ----------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.exhaustive
def test_links_of_this_machine_are_measured_between_processes_once() -> None:
    """Two real processes over a real link, and a third one that copies; then the cache answers."""
    steps: list[ProfileStep] = []
    real = replace(wish(), program=link_profiling.PROGRAM)
    first = profile_links(real, shell(), steps.append)
    (found,) = first.measured.links
    assert (first.cached, found.between, found.transport) == (False, (NODE, NODE), "shared_memory")
    assert found.speed.bytes_per_second > 1e6
    assert 1e-6 < found.speed.latency_seconds < 0.1
    assert {copy.node for copy in first.measured.copies} == {NODE}
    assert [step.done for step in steps] == [0, 1]
    again = profile_links(real, shell(found.measured_at + 60), steps.append)
    assert again == ProfiledLinks(first.measured, cached=True)
    assert len(steps) == 2


@pytest.mark.processes
def test_a_process_that_dies_is_an_error_with_its_last_words() -> None:
    with pytest.raises(
        JobFailed, match=r"process that measures links was killed by SIGKILL .* last output: out of luck"
    ):
        profile_links(wish("print('out of luck', flush=True)\nos.kill(os.getpid(), 9)\n"), shell(), lambda _: None)


@pytest.mark.processes
def test_ends_that_do_not_find_each_other_are_an_error() -> None:
    body = "tell({'error': 'PeerUnreachable', 'problems': ['nobody there']})\n"
    with pytest.raises(PeerUnreachable, match="nobody there"):
        profile_links(wish(body), shell(), lambda _: None)
    assert cached_links(wish(), shell()) == MeasuredLinks(), "half a measurement is none"


@pytest.mark.processes
def test_a_silent_process_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_profiling, "_PATIENCE_SECONDS", 0.1)
    with pytest.raises(DeadlineExceeded, match="process that measures links has reported no progress"):
        profile_links(wish("sys.stdin.read()\n"), shell(), lambda _: None)
