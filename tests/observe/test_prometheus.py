"""The endpoint, as Prometheus sees it."""

from __future__ import annotations

import json
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hetpipe.errors import PortInUse, UserError
from hetpipe.observe.log import configure_logging
from hetpipe.observe.metric_names import FAMILIES
from hetpipe.observe.metrics_endpoint import metrics_endpoint
from hetpipe.observe.prometheus import MAX_SCRAPES
from hetpipe.observe.readings import Distribution, Reading

HOST = "127.0.0.1"


def clocks() -> Iterable[Reading]:
    yield Reading("hetpipe_vw_clock", 7, ("digits-1", 0))
    yield Reading("hetpipe_job_samples_total", 1_000_000_001, ("digits-1",))
    yield Reading("hetpipe_vw_loss", float("nan"), ('a "quoted"\nname', 1))
    yield Reading("hetpipe_rpc_seconds", Distribution((1, 0, 2, 0, 0, 1), 60.5), ("Push",))


def scrape(port: int | None, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{HOST}:{port}{path}", timeout=10.0) as answer:
        body: bytes = answer.read()
    return body.decode()


def test_a_scrape_has_what_the_sources_tell() -> None:
    with metrics_endpoint(HOST, 0, "coordinator", clocks) as port:
        families = {family.name: family for family in text_string_to_metric_families(scrape(port))}
    ours = {name: family for name, family in families.items() if name.startswith("hetpipe_")}
    assert {name: family.type for name, family in ours.items()} == {
        "hetpipe_info": "gauge",
        "hetpipe_rpc_seconds": "histogram",
        "hetpipe_job_samples": "counter",
        "hetpipe_vw_clock": "gauge",
        "hetpipe_vw_loss": "gauge",
    }
    assert ours["hetpipe_info"].samples[0].labels["role"] == "coordinator"
    assert ours["hetpipe_job_samples"].samples[0].value == 1_000_000_001
    assert ours["hetpipe_vw_loss"].samples[0].labels == {"job": 'a "quoted"\nname', "vw": "1"}
    assert ours["hetpipe_vw_clock"].documentation == FAMILIES["hetpipe_vw_clock"].help
    buckets = [sample for sample in ours["hetpipe_rpc_seconds"].samples if sample.name.endswith("_bucket")]
    assert [(sample.labels["le"], sample.value) for sample in buckets] == [
        ("0.001", 1.0), ("0.01", 1.0), ("0.1", 3.0), ("1.0", 3.0), ("10.0", 3.0), ("+Inf", 4.0),
    ]  # fmt: skip
    assert {"process_cpu_seconds", "process_resident_memory_bytes"} <= families.keys()


def test_without_a_port_nothing_is_served() -> None:
    with metrics_endpoint(HOST, None, "stage", clocks) as port:
        assert port is None


def test_a_taken_port_is_one_sentence_and_a_closed_endpoint_frees_its() -> None:
    with metrics_endpoint(HOST, 0, "agent") as port, pytest.raises(PortInUse) as caught:
        metrics_endpoint(HOST, port, "agent").__enter__()
    assert str(caught.value) == f"address {HOST}:{port} is in use; choose another with --metrics-port"
    with metrics_endpoint(HOST, port, "agent"):
        assert "hetpipe_info" in scrape(port)


@pytest.mark.parametrize(
    ("host", "sentence"),
    [("no-such-host.invalid", "the host name is unknown"), ("192.0.2.1", "cannot serve metrics on 192.0.2.1")],
)
def test_a_host_that_is_not_ours(host: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        metrics_endpoint(host, 0, "agent").__enter__()


def test_without_its_extra_the_option_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UserError, match=r"--metrics-port needs the extra `metrics`: pip install 'hetpipe\[metrics\]'"):
        metrics_endpoint(HOST, 0, "agent").__enter__()


def test_a_source_that_fails_is_logged_and_the_endpoint_lives(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    configure_logging(tmp_path / "log", role="agent")
    broken = [Reading("hetpipe_wishes", 1)]
    with metrics_endpoint(HOST, 0, "agent", lambda: broken) as port:
        with pytest.raises(urllib.error.HTTPError) as caught:
            scrape(port)
        caught.value.close()
        assert caught.value.code == 500
        broken.clear()
        assert "hetpipe_info" in scrape(port)
    served, line = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert (served["event"], served["port"], line["event"]) == ("metrics_served", port, "scrape_failed")
    assert "hetpipe_wishes is not in the list" in line["exception"]
    assert capfd.readouterr() == ("", "")


def test_connections_that_say_nothing_are_few() -> None:
    with metrics_endpoint(HOST, 0, "agent") as port:
        silent = [socket.create_connection((HOST, port or 0), timeout=10.0) for _ in range(MAX_SCRAPES)]
        late = socket.create_connection((HOST, port or 0), timeout=10.0)
        assert late.recv(1) == b"", "it is closed at once"
        for connection in (*silent, late):
            connection.close()
