"""Certificates of stages: made, renewed in time, tried again, forgotten. The coordinator is a fake."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest

from hetpipe.certs.authority import Authority, facts_of
from hetpipe.certs.files import CA_FILE, CERT_FILE, KEY_FILE
from hetpipe.errors import HetpipeError, PeerUnreachable, PermissionDenied
from hetpipe.server.agent.stage_certificates import StageCertificates
from hetpipe.values.commands import StageKey
from hetpipe.values.ids import Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex
from hetpipe.wire.tls import CHECK_SECONDS, Tls
from tests.certs.cluster import AGENT, cluster
from tests.support.fake_clock import FakeClock

#: Certificates of stages last 7 days.
HALF_LIFE_SECONDS = 3.5 * 24 * 3600


def key(stage: int = 0, *, incarnation: int = 0) -> StageKey:
    return StageKey(JobId("job"), VirtualWorkerIndex(0), StageIndex(stage), Incarnation(incarnation), Term(1))


class Bench:
    """An agent's certificates, the clock, and a coordinator that certifies or raises."""

    def __init__(self, folder: Path) -> None:
        self.clock = FakeClock()
        self.agent = shutil.copytree(cluster().tls(AGENT).folder, folder / "agent")
        self.asked: list[StageKey] = []
        self.error: HetpipeError | None = None
        self.signer = cluster().signer()
        self.certificates = StageCertificates(Tls(self.agent, clock=self.clock), self.certify, clock=self.clock)

    def certify(self, stage: StageKey, request_pem: bytes) -> bytes:
        self.asked.append(stage)
        if self.error is not None:
            raise self.error
        return self.signer.sign_stage(request_pem, stage.peer)

    def after(self, seconds: float) -> int:
        """How many stages are asked for when that time has passed."""
        self.asked.clear()
        self.clock.advance(seconds)
        self.certificates.renew()
        return len(self.asked)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return Bench(tmp_path)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class TestMaking:
    def test_a_stage_gets_a_folder_that_works(self, bench: Bench) -> None:
        folder = bench.certificates.make(key(1))
        tls = Tls(folder)
        assert str(facts_of(tls.material.cert).peer) == "stage 1 of virtual worker 0 of job job (life 0 in term 1)"
        assert tls.material.ca == cluster().authority().certificate_pem
        assert stat.S_IMODE((folder / KEY_FILE).stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700

    def test_every_life_has_its_own_key(self, bench: Bench) -> None:
        folders = [bench.certificates.make(one) for one in (key(), key(1), key(incarnation=1))]
        assert len({(folder / KEY_FILE).read_bytes() for folder in folders}) == 3

    def test_a_refusal_leaves_no_key_behind(self, bench: Bench) -> None:
        bench.error = PermissionDenied("no such stage")
        with pytest.raises(PermissionDenied):
            bench.certificates.make(key())
        (root,) = (path for path in bench.agent.parent.iterdir() if path != bench.agent)
        assert [path for path in root.iterdir() if path.is_dir()] == []
        assert bench.after(HALF_LIFE_SECONDS) == 0


class TestEnding:
    def test_a_stage_that_has_ended_is_forgotten(self, bench: Bench) -> None:
        folder, other = bench.certificates.make(key()), bench.certificates.make(key(1))
        bench.certificates.forget(key())
        bench.certificates.forget(key())
        assert not folder.exists()
        assert other.exists()
        assert bench.after(HALF_LIFE_SECONDS) == 1

    def test_one_that_ends_while_it_is_renewed_stays_forgotten(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = bench.certificates.make(key())
        sign = bench.signer.sign_stage

        def forgetful(stage: StageKey, request_pem: bytes) -> bytes:
            bench.certificates.forget(stage)
            return sign(request_pem, stage.peer)

        monkeypatch.setattr(bench.certificates, "_certify", forgetful)
        bench.clock.advance(HALF_LIFE_SECONDS)
        bench.certificates.renew()
        assert not folder.exists()

    def test_the_end_of_the_agent_leaves_nothing(self, bench: Bench) -> None:
        bench.certificates.make(key())
        bench.certificates.close()
        assert list(bench.agent.parent.iterdir()) == [bench.agent]


class TestRenewal:
    def test_nothing_is_asked_for_before_half_of_its_life(self, bench: Bench) -> None:
        bench.certificates.make(key())
        assert bench.after(0.0) == 0
        assert bench.after(HALF_LIFE_SECONDS - 1.0) == 0
        assert bench.after(1.0) == 1
        assert bench.after(HALF_LIFE_SECONDS - 1.0) == 0
        assert bench.after(1.0) == 1

    def test_the_key_stays(self, bench: Bench) -> None:
        folder = bench.certificates.make(key())
        before = content(folder)
        bench.after(HALF_LIFE_SECONDS)
        after = content(folder)
        assert {name for name in before if before[name] != after[name]} == {CERT_FILE}
        assert before.keys() == after.keys()
        assert Tls(folder).material.key == before[KEY_FILE]

    def test_a_coordinator_that_is_away_is_asked_again_after_a_minute(self, bench: Bench) -> None:
        folder = bench.certificates.make(key())
        before = content(folder)
        bench.error = PeerUnreachable("away")
        assert bench.after(HALF_LIFE_SECONDS) == 1
        assert content(folder) == before
        assert bench.after(59.0) == 0
        assert bench.after(1.0) == 1
        bench.error = None
        assert bench.after(60.0) == 1
        assert content(folder) != before
        assert bench.after(60.0) == 0

    def test_whom_the_agent_trusts_its_stages_trust_soon(self, bench: Bench) -> None:
        folder = bench.certificates.make(key())
        both = cluster().authority().certificate_pem + Authority.new_root().certificate_pem
        (bench.agent / CA_FILE).write_bytes(both)
        bench.error = PeerUnreachable("away")
        assert bench.after(CHECK_SECONDS) == 1
        assert (folder / CA_FILE).read_bytes() == both, "for that nobody need be asked"
        assert bench.after(30.0) == 0
        bench.error = None
        assert bench.after(30.0) == 1
        assert Tls(folder).material.ca == both
