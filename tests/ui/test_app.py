"""The server of `hetpipe ui`: who may ask, what is there, and that nothing but runs is."""

from __future__ import annotations

import html
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from hetpipe.observe.metrics import metrics_path
from hetpipe.observe.segments import packed_path, segments_of
from hetpipe.server.decisions_file import append_decision
from hetpipe.ui.app import MOST_COMPARED, REFRESH_SECONDS, make_app
from hetpipe.values.activation import Activation
from hetpipe.values.decisions import DecisionMoment, FreezeDecision, MoveDecision, StayDecision
from hetpipe.values.events import JobState
from hetpipe.values.ids import Clock, VirtualWorkerIndex
from hetpipe.values.plan import Plan
from hetpipe.values.wire import to_json
from tests.cli.fakes import FakeCoordinator, shell_with
from tests.report.test_plan_page import Page
from tests.support.fake_clock import FakeClock
from tests.ui import folders

TOKEN = "a secret of the user"


def client_of(
    runs_dir: Path, coordinator: FakeCoordinator | None = None, *, token: str | None = None, at: str = "127.0.0.1:7480"
) -> TestClient:
    shell = shell_with(coordinator or FakeCoordinator(), runs_dir.parent)
    return TestClient(make_app(runs_dir, shell, token=token), base_url=f"http://{at}", follow_redirects=False)


def text_of(client: TestClient, address: str) -> str:
    answer = client.get(address)
    assert answer.status_code == 200, answer.text
    return answer.text


def words_of(client: TestClient, address: str) -> str:
    """The words of a page, as a browser without JavaScript shows them."""
    text = text_of(client, address)
    Page(text)
    shown = re.sub(r"<(script|style).*?</\1>|<[^>]+>", " ", text, flags=re.DOTALL)
    return " ".join(html.unescape(shown).split())


def events_of(client: TestClient, address: str) -> list[tuple[str, Any]]:
    """The events of a stream that ends."""
    found = re.findall(r"event: (\w+)\ndata: (.*)\n\n", text_of(client, address))
    return [(name, json.loads(data)) for name, data in found]


def test_the_list_has_running_runs_first_then_the_newest(tmp_path: Path) -> None:
    folders.finished(tmp_path, "old", started=10.0)
    folders.failed(tmp_path, "broken", "it broke", started=20.0)
    live = folders.run_in(tmp_path, "live", started=5.0, local=False)
    (tmp_path / "latest").symlink_to("old")
    (tmp_path / "no-run").mkdir()
    client = client_of(tmp_path, FakeCoordinator(status=folders.status_of(live)))
    text = text_of(client, "/")
    assert re.findall(r'href="/runs/([^"]+)"', text) == ["live", "broken", "old"]
    shown = words_of(client, "/")
    assert "1 running, 1 failed, 1 finished" in shown or "1 failed, 1 finished, 1 running" in shown
    assert re.search(r"live running 62\.5 % 1\.1100 300 tests\.models:mlp32", shown), shown
    assert re.search(r"broken failed – – – tests\.models:mlp32", shown), shown
    assert re.search(r"old finished 100\.0 % 1\.1000 184 ", shown), shown


def test_a_run_that_trains_is_shown_as_its_coordinator_tells(tmp_path: Path) -> None:
    live = folders.run_in(tmp_path, "live", local=False)
    folders.planned(live)
    folders.trained(live)
    client = client_of(tmp_path, FakeCoordinator(status=folders.status_of(live)))
    text, shown = text_of(client, "/runs/live"), words_of(client, "/runs/live")
    for words in ("62.5 % · 800 of 1280 samples", "node-0/0", "layers 0–2", "0 of 2", "the others mostly wait for it"):
        assert words in shown, words
    assert "stage 1 of virtual worker 0 takes 2.4 times as long as planned" in shown
    assert "next barrier 9 (epoch)" in shown
    assert 'data-events="/runs/live/events"' in text


def test_a_finished_run_needs_nobody(tmp_path: Path) -> None:
    folders.finished(tmp_path, "old")
    client = client_of(tmp_path)
    text, shown = text_of(client, "/runs/old"), words_of(client, "/runs/old")
    assert "data-events" not in text
    assert "accuracy" in shown
    assert "n1/1 layers 2–3" in shown
    assert "life 1" in shown
    assert "virtual worker 1 is ready" in shown
    assert "the disk of /runs is full" in shown


def test_frozen_layers_are_shown_with_what_decided_them(tmp_path: Path) -> None:
    path = folders.finished(tmp_path, "old")
    folders.ended(path, frozen=[{"clock": 0, "frozen": 1, "layers": 1}, {"clock": 9, "frozen": 2, "layers": 4}])
    decided = FreezeDecision(DecisionMoment(Clock(9)), "freeze", 2, "norms", "norms of gradients", 1.0)
    append_decision(path, decided)
    shown = words_of(client_of(tmp_path), "/runs/old")
    assert "frozen from clock 0 on layer 0 (1 with parameters) " in shown
    assert "frozen from clock 9 on layers 0-3 (2 with parameters): norms of gradients" in shown


def test_inactive_layers_are_shown_by_name(tmp_path: Path) -> None:
    path = folders.finished(tmp_path, "old")
    plan = replace(folders.plan_of(2), activations=(Activation(Clock(0), (1, 2)), Activation(Clock(4), (3,))))
    (path / "plan.json").write_text(to_json(Plan, plan))
    facts = json.loads((path / "facts.json").read_text()) | {"layers": ["stem", "a", "b", "head"]}
    (path / "facts.json").write_text(json.dumps(facts))
    shown = words_of(client_of(tmp_path), "/runs/old")
    assert "inactive from clock 0 on layers 1-2 (a, b) " in shown
    assert "inactive from clock 4 on layer 3 (head) " in shown


def test_cuts_are_shown_over_time_with_what_they_gained(tmp_path: Path) -> None:
    path = folders.finished(tmp_path, "old")
    move = MoveDecision(
        DecisionMoment(Clock(9)), "move", VirtualWorkerIndex(1), (3, 1), 1, "straggler", "stage 0 is slow", 1.9, 1.0
    )
    append_decision(path, move)
    at, vw, why = DecisionMoment(Clock(6)), VirtualWorkerIndex(1), "it gains too little"
    append_decision(path, StayDecision(at, "stay", vw, (1, 3), "straggler", why, 0.02, 1.0))
    shown = words_of(client_of(tmp_path), "/runs/old")
    assert "Cuts over time" in shown
    assert "6 1 stays as it is cut, not 1-3 straggler – – – +2 % it gains too little" in shown
    assert "0 1 2-2 plan – – – –" in shown
    assert "9 1 3-1 straggler 40.0 40.0 +0 % +190 % stage 0 is slow" in shown
    assert "plan version 1" in shown


def test_a_failed_run_says_why_first(tmp_path: Path) -> None:
    folders.failed(tmp_path, "broken", "stage 0 of virtual worker 1 ran out of memory")
    shown = Page(text_of(client_of(tmp_path), "/runs/broken")).text
    assert shown.index("ran out of memory") < shown.index("Curves")
    assert re.search(r"training loss\s*\d\.\d{4}", shown), "its result has none; its curve has"
    assert "30.0 % · 384 of 1280 samples" in shown
    words = words_of(client_of(tmp_path), "/runs/broken")
    assert "0 n0/0 layers 0–1 n0/1 layers 2–3 12 – –" in words, "its clock"
    assert "allowed distance 2" in words


def test_a_pending_run_has_its_place_and_its_priority(tmp_path: Path) -> None:
    path = folders.run_in(tmp_path, "later", local=False)
    client = client_of(tmp_path, FakeCoordinator(status=folders.pending_status(path)))
    assert "later pending 2nd in the queue, priority 5 – –" in words_of(client, "/")
    assert "2nd in the queue, priority 5; needs 4 devices" in words_of(client, "/runs/later")


def test_a_finished_run_says_how_its_weights_are_exported(tmp_path: Path) -> None:
    path = folders.finished(tmp_path, "old")
    assert f"hetpipe export {path} model.safetensors" in words_of(client_of(tmp_path), "/runs/old")


def test_a_run_without_anything_yet(tmp_path: Path) -> None:
    folders.run_in(tmp_path, "new")
    shown = Page(text_of(client_of(tmp_path), "/runs/new")).text
    for words in ("No wave has been trained.", "There is no plan."):
        assert words in shown
    for heading in ("Clocks", "Plan and measured", "Logs"):
        assert heading not in shown, "it would have nothing below it"


def test_no_run_at_all_says_how_to_start_one(tmp_path: Path) -> None:
    assert "hetpipe demo" in Page(text_of(client_of(tmp_path / "missing"), "/")).text


def test_runs_side_by_side(tmp_path: Path) -> None:
    folders.finished(tmp_path, "a", batch_size=4)
    folders.finished(tmp_path, "b", batch_size=8)
    address = "/compare?run=a&run=b&run=a"
    text, shown = text_of(client_of(tmp_path), address), words_of(client_of(tmp_path), address)
    assert "batch_size 4 8" in shown
    assert "seed" not in shown
    titles = [found.get("aria-label") or "" for tag, found in Page(text).elements if tag == "figure"]
    assert [title.split(": ")[0] for title in titles] == ["Training loss", "Evaluation", "Evaluation"]
    assert "a ends at" in titles[0]
    assert "b ends at" in titles[0]
    for wrong in ("/compare", "/compare?run=a", "/compare?" + "&".join(f"run={n}" for n in range(MOST_COMPARED + 1))):
        assert client_of(tmp_path).get(wrong).status_code == 400
    assert client_of(tmp_path).get("/compare?run=a&run=gone").status_code == 404


def test_the_runs_of_a_comparison_are_there(tmp_path: Path) -> None:
    folders.finished(tmp_path, "alone")
    comparison = tmp_path / "compare-small"
    for name in ("wave-seed-0", "stash-seed-0"):
        folders.finished(comparison, name)
    folders.finished(comparison / "folder", "too-deep")
    client = client_of(tmp_path)
    names = {"alone", "compare-small/wave-seed-0", "compare-small/stash-seed-0"}
    assert set(re.findall(r'href="/runs/([^"]+)"', text_of(client, "/"))) == names
    address = "/runs/compare-small/wave-seed-0"
    assert f'href="{address}/logs/coordinator.log"' in text_of(client, address)
    assert "worker_lost" in text_of(client, f"{address}/logs/coordinator.log")
    assert [name for name, _ in events_of(client, f"{address}/events")] == ["parts", "over"]
    shown = words_of(client, "/compare?run=compare-small/wave-seed-0&run=compare-small/stash-seed-0")
    assert "compare-small/stash-seed-0 finished" in shown
    assert "wave-seed-0 finished" in words_of(client_of(comparison), "/")


def test_changes_of_a_run_are_sent_until_it_has_ended(tmp_path: Path) -> None:
    path = folders.run_in(tmp_path, "live", local=False)
    client = client_of(tmp_path, FakeCoordinator(status=folders.status_of(path)))
    text_of(client, "/runs/live")
    folders.finished(tmp_path, "other")
    events = events_of(client, "/runs/other/events")
    assert [name for name, _ in events] == ["parts", "over"]
    assert set(events[0][1]) == {"head", "charts", "workers", "clocks", "plan", "faults", "logs", "job"}
    ends = FakeCoordinator(status=replace(folders.status_of(path), state=JobState.FAILED, failure="it broke"))
    assert [name for name, _ in events_of(client_of(tmp_path, ends), "/runs/live/events")] == ["parts", "over"]


def test_new_waves_are_new_points(tmp_path: Path) -> None:
    path = folders.run_in(tmp_path, "live", local=False)
    folders.planned(path)
    folders.trained(path, waves=3)
    clock = FakeClock()
    shell = replace(shell_with(FakeCoordinator(status=folders.status_of(path)), tmp_path), clock=clock)
    client = TestClient(make_app(tmp_path, shell, token=None), base_url="http://localhost")
    assert '"x":[8,16,24]' in text_of(client, "/runs/live")
    with metrics_path(path, 0).open("ab") as first, metrics_path(path, 1).open("ab") as second:
        first.write(folders.wave_line(0, 3))
        second.write(folders.wave_line(1, 3)[:-20])
    clock.advance(REFRESH_SECONDS)
    assert '"x":[4,12,20,28]' in text_of(client, "/runs/live")


@pytest.mark.parametrize(
    "address",
    [
        "/runs/%2e%2e",
        "/runs/..%2fsecret",
        "/runs/latest",
        "/runs/a/logs/..%2frun.json",
        "/runs/a/logs/%2e%2e%2f%2e%2e%2fsecret%2frun.json",
        "/runs/a/logs/link.log",
        "/runs/a/logs/missing.log",
        "/runs/missing",
        "/runs/a/run.json",
        "/etc/passwd",
    ],
)
def test_nothing_but_runs_and_their_logs_is_there(address: str, tmp_path: Path) -> None:
    runs_dir = tmp_path / "runs"
    folders.finished(tmp_path, "secret")
    path = folders.finished(runs_dir, "a")
    (runs_dir / "latest").symlink_to(tmp_path / "secret")
    (path / "logs" / "link.log").symlink_to(tmp_path / "secret" / "run.json")
    answer = client_of(runs_dir).get(address)
    assert answer.status_code == 404, answer.text
    assert "tests.models" not in answer.text


def test_a_log_is_text(tmp_path: Path) -> None:
    path = folders.failed(tmp_path, "broken", folders.HOSTILE)
    (path / "logs" / "stage.out").write_text(f"Traceback: {folders.HOSTILE}\nnot JSON: {{\n")
    client = client_of(tmp_path)
    for log in ("vw-1-stage-0.log", "coordinator.log", "stage.out"):
        text = text_of(client, f"/runs/broken/logs/{log}")
        assert "<img" not in text
        assert folders.HOSTILE in Page(text).text
    assert 'class="bad"' in text_of(client, "/runs/broken/logs/vw-1-stage-0.log")


def test_names_from_outside_are_escaped_everywhere(tmp_path: Path) -> None:
    name = "<b onclick=alert(1)>&'"
    path = folders.finished(tmp_path, name, model=f"tests.models:{'mlp32'}")
    folders.evaluated(path, 400, name=folders.HOSTILE)
    job = json.loads((path / "job.json").read_text())
    (path / "job.json").write_text(json.dumps({**job, "model": folders.HOSTILE, "name": folders.HOSTILE}))
    folders.ended(path, "failed", errors=[folders.HOSTILE])
    client = client_of(tmp_path)
    (href,) = re.findall(r'href="(/runs/[^"]+)"', text_of(client, "/"))
    folders.finished(tmp_path, "plain")
    for address in ("/", href, f"/compare?run=plain&run={href.removeprefix('/runs/')}"):
        text = text_of(client, address)
        assert "<img" not in text
        assert "<b onclick" not in text
        Page(text)


def test_only_names_of_this_machine_are_answered_without_a_token(tmp_path: Path) -> None:
    for host, status in (("127.0.0.1:7480", 200), ("localhost", 200), ("[::1]:7480", 200), ("evil.example", 403)):
        assert client_of(tmp_path, at=host).get("/").status_code == status


def test_with_a_token_every_request_needs_it(tmp_path: Path) -> None:
    folders.finished(tmp_path, "a")
    client = client_of(tmp_path, token=TOKEN, at="training.example:7480")
    for address in ("/", "/events", "/runs/a", "/runs/a/events", "/runs/a/logs/coordinator.log", "/compare", "/x"):
        assert client.get(address).status_code == 401
        assert client.get(address, params={"token": "wrong"}).status_code == 401
    assert client.get("/runs/a", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert client.get("/runs/a", headers={"authorization": "Bearer wrong"}).status_code == 401
    answer = client.get("/runs/a", params={"token": TOKEN, "more": "1"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/runs/a?more=1")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert TOKEN not in cookie
    assert client.get("/runs/a").status_code == 200


def test_a_token_sends_nobody_elsewhere(tmp_path: Path) -> None:
    answer = client_of(tmp_path, token=TOKEN).get("//evil.example/", params={"token": TOKEN})
    assert not answer.headers.get("location", "/").startswith("//")


def test_every_answer_forbids_what_pages_do_not_need(tmp_path: Path) -> None:
    for address in ("/", "/missing"):
        answer = client_of(tmp_path).get(address)
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["cache-control"] == "no-store"
        assert "connect-src 'self'" in answer.text
        assert "default-src 'none'" in answer.text
    assert client_of(tmp_path).post("/").status_code == 405


def test_a_coordinator_that_is_away_leaves_what_the_folder_has(tmp_path: Path) -> None:
    path = folders.run_in(tmp_path, "far", local=False)
    folders.planned(path)
    folders.trained(path)

    class Away(FakeCoordinator):
        def status(self, job_id: Any = None) -> Any:
            from hetpipe.errors import PeerUnreachable

            raise PeerUnreachable("gone")

    text = text_of(client_of(tmp_path, Away()), "/runs/far")
    assert "unknown" in Page(text).text
    assert "training" in Page(text).text


def test_damaged_files_are_left_out(tmp_path: Path) -> None:
    path = folders.finished(tmp_path, "a")
    for name in ("plan.json", "facts.json", "evaluations.jsonl", "decisions.jsonl", "forecast.json"):
        (path / name).write_bytes(b'{"x": [1')
    with metrics_path(path, 0).open("ab") as file:
        file.write(b"\xff\xfe no line\n{}\n[]\n")
    assert "There is no plan." in Page(text_of(client_of(tmp_path), "/runs/a")).text
    (path / "run.json").write_bytes(b"{")
    assert client_of(tmp_path).get("/runs/a").status_code == 404
    assert "hetpipe demo" in Page(text_of(client_of(tmp_path), "/")).text


def test_a_long_run_is_read_by_its_index(tmp_path: Path) -> None:
    """All that its compressed segments hold is in the page, though none can be read."""
    path = folders.long_run(tmp_path, "long", minibatches=80_000, segment_bytes=100_000)
    file = metrics_path(path, 0)
    packed = [packed_path(file, number) for number in segments_of(file)[:-1]]
    assert packed
    for one in packed:
        one.write_bytes(b"no gzip")
    text = text_of(client_of(tmp_path), "/runs/long")
    assert "80000" in text


@pytest.mark.exhaustive
def test_a_run_of_a_million_minibatches_opens_within_two_seconds(tmp_path: Path) -> None:
    folders.long_run(tmp_path, "long")
    client = client_of(tmp_path)
    began = time.process_time()
    text = text_of(client, "/runs/long")
    assert time.process_time() - began < 2.0
    assert "1000000" in text


def test_a_hundred_runs_are_listed_within_a_second(tmp_path: Path) -> None:
    for number in range(100):
        path = folders.run_in(tmp_path, f"run-{number}", started=float(number))
        folders.planned(path)
        folders.ended(path)
    client = client_of(tmp_path)
    began = time.process_time()
    text = text_of(client, "/")
    assert time.process_time() - began < 1.0
    assert text.count('type="checkbox"') == 100
