"""Shards that are killed at any moment and started again: nothing acknowledged is lost, nothing counts twice."""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetpipe import durable, failpoints
from hetpipe.decide.sync.records import SegmentRecord
from hetpipe.errors import StaleIncarnation
from hetpipe.observe.history import MemoryHistory
from hetpipe.server.shard.push_log import PushLimits
from hetpipe.server.shard.push_session import PushSession
from hetpipe.storage.wal import snapshot, snapshotted_log
from hetpipe.values.activation import Activation
from hetpipe.values.ids import Clock, Incarnation, VirtualWorkerIndex
from hetpipe.values.requests import Requester, Watermarks
from tests.pipeline.witness import Witness
from tests.server.shard.builders import encode, push_header, requester
from tests.server.shard.crashes import EAGER, LAZY, AtOnce, Cluster, Crashes, ones, train, waves


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody cuts the power here."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    return train(Cluster(tmp_path_factory.mktemp("undisturbed"), staleness=2), {})


class TestKilledAtAnyMoment:
    @pytest.mark.matrix
    @given(st.dictionaries(st.integers(0, 113), st.integers(0, 2), max_size=6), st.sampled_from([EAGER, LAZY]))
    @settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_everything_is_as_without(
        self, undisturbed: Cluster, tmp_path_factory: pytest.TempPathFactory, crashes: Crashes, limits: PushLimits
    ) -> None:
        cluster = train(Cluster(tmp_path_factory.mktemp("run"), staleness=2, limits=limits), crashes)

        assert cluster.records == undisturbed.records
        assert cluster.held == undisturbed.held
        assert any(isinstance(record, SegmentRecord) and record.start for record in cluster.records), "a barrier"
        for index in range(2):
            for found, expected in zip(cluster.pull(8, index), undisturbed.pull(8, index), strict=True):
                assert torch.equal(found, expected)
            assert cluster.lines(index) == undisturbed.lines(index)

    @pytest.mark.matrix
    @pytest.mark.parametrize("limits", [EAGER, LAZY])
    def test_again_and_again(self, tmp_path: Path, limits: PushLimits) -> None:
        cluster, expected = (
            train(Cluster(tmp_path / name, staleness=2, limits=limits), crashes)
            for name, crashes in (("killed", dict.fromkeys(range(0, 200, 5), 2)), ("undisturbed", {}))
        )

        assert cluster.records == expected.records
        assert cluster.held == expected.held
        assert all(cluster.lines(index) == expected.lines(index) for index in range(2))
        assert torch.equal(cluster.pull(8, 1)[1], expected.pull(8, 1)[1])

    def test_witness_weights(self, tmp_path: Path) -> None:
        witness = Witness(num_vws=2, num_waves=4, num_slices=2)
        sizes = [witness.slice_elements] * 2
        cluster = Cluster(tmp_path, num_shards=1, sizes=sizes).begin()
        for wave in range(4):
            for vw in range(2):
                update = [witness.update(vw, wave, index) for index in range(2)]
                cluster.push(requester(vw), wave, update, 0)
                cluster.crash(0)
                assert cluster.push(requester(vw), wave, update, 0)
                cluster.report(requester(vw), wave)
                cluster.crash(0)

        assert witness.faults(cluster.pull(4, 0)) == []

    def test_an_evicted_one_stays_evicted_and_what_it_committed_stays(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path, num_shards=1, staleness=2).begin()
        cluster.push(requester(1), 0, ones(2.0), 0)
        cluster.report(requester(1), 0)
        cluster.push(requester(1), 1, ones(100.0), 0)
        cluster.clock.evict(VirtualWorkerIndex(1), Incarnation(0))
        cluster.settle()
        cluster.crash(0)
        with pytest.raises(StaleIncarnation):
            cluster.push(requester(1), 1, ones(100.0), 0)
        cluster.push(requester(0), 0, ones(3.0), 0)
        cluster.report(requester(0), 0)

        assert torch.equal(cluster.pull(1, 0)[0], ones(5.0)[0])
        assert len(cluster.histories[0].of("evict")) == 1

    @pytest.mark.parametrize("limits", [EAGER, LAZY])
    def test_layers_that_are_built_anew(self, tmp_path: Path, limits: PushLimits) -> None:
        """Their weights are staged beside the first wave; the barrier's stay as they were."""
        renewal = Activation(Clock(1), (), (0,))
        cluster = Cluster(tmp_path, num_shards=1, staleness=1, limits=limits, activations=(renewal,)).begin(ones())
        shards = cluster.processes
        for vw in (0, 1):
            cluster.push(requester(vw), 0, ones(10.0), 0)
            cluster.report(requester(vw), 0)
        for vw in (1, 0):
            header = replace(push_header(requester(vw), 1, cluster.headers[:1]), fresh=True)
            session = shards[0].shard.begin_push(header)
            assert isinstance(session, PushSession)
            for chunk in encode(ones(7.0)[:1]):
                session.write(chunk)
            session.finish()
            cluster.crash(0)
            assert isinstance(shards[0].shard.begin_push(header), Watermarks)
            cluster.push(requester(vw), 1, ones(100.0), 0)
            cluster.crash(0)
        assert [float(tensor[0]) for tensor in cluster.pull(1, 0)] == [21.0, 21.0]
        for vw in (0, 1):
            cluster.report(requester(vw), 1)
            cluster.crash(0)
        assert [float(tensor[0]) for tensor in cluster.pull(2, 0)] == [207.0, 221.0]
        staged = [(line["vw"], line["slices"]) for line in cluster.histories[0].of("staged") if line["wave"] == 1]
        assert sorted(staged) == [(0, [0, 1]), (1, [0, 1])], "each wave once"

    @pytest.mark.parametrize("limits", [EAGER, LAZY])
    def test_a_new_life_of_a_virtual_worker(self, tmp_path: Path, limits: PushLimits) -> None:
        def live(name: str, victim: int | None) -> Cluster:
            cluster = Cluster(tmp_path / name, staleness=1, limits=limits).begin(ones())
            later = requester(1, incarnation=1)

            def wave(who: Requester, number: int) -> None:
                for index in range(2):
                    cluster.push(who, number, ones(10.0 * who.vw + number), index)
                    cluster.strike(victim)
                cluster.report(who, number)
                cluster.strike(victim)

            wave(requester(0), 0)
            wave(requester(1), 0)
            cluster.push(requester(1), 1, ones(1000.0), 0)
            cluster.clock.evict(VirtualWorkerIndex(1), Incarnation(0))
            cluster.strike(victim)
            cluster.clock.admit(VirtualWorkerIndex(1), Incarnation(1), 1)
            cluster.strike(victim)
            cluster.clock.join(later)
            cluster.settle()
            joined = cluster.clock.snapshot().barrier
            for number in range(1, joined):
                wave(requester(0), number)
            for number in range(joined, joined + 2):
                wave(requester(0), number)
                wave(later, number)
            return cluster

        killed, expected = live("killed", 2), live("undisturbed", None)
        newest = expected.clock.snapshot().published
        assert killed.records == expected.records
        for index in range(2):
            assert torch.equal(killed.pull(newest, index)[1], expected.pull(newest, index)[1])
            assert killed.lines(index) == expected.lines(index)

    def test_a_stage_still_hears_where_its_neighbour_is(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path, num_shards=1, stages=(2, 2))
        for _ in range(3):
            cluster.clock.join(requester(1, 0), "there")
        cluster.crash(0)

        assert cluster.clock.join(requester(1, 1)).link == "there"


class TestKilledWhereItHurts:
    """What is on the disk at every failpoint of pushes and snapshots is enough to go on from."""

    @pytest.mark.matrix
    def test_photographs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(threading, "Thread", AtOnce)
        cluster = Cluster(tmp_path / "run", num_shards=1)
        taken: list[tuple[str, int, Path, MemoryHistory]] = []

        def photograph(name: str) -> None:
            if name.startswith(("snapshot.", "push.")):
                copy = tmp_path / f"photograph-{len(taken)}"
                shutil.copytree(tmp_path / "run", copy)
                history = MemoryHistory()
                history._events.extend(cluster.histories[0].events)
                taken.append((name, cluster.next_wave, copy, history))

        monkeypatch.setattr(failpoints, "reach", photograph)
        for module in (durable, snapshotted_log, snapshot):
            monkeypatch.setattr(module, "reach", photograph)
        cluster.begin()
        waves(cluster, 3)
        monkeypatch.undo()

        assert {name for name, *_ in taken} == {
            *(f"snapshot.{place}" for place in ("temp_open", "half_written", "before_fsync", "before_rename")),
            "snapshot.before_directory_fsync",
            "snapshot.old_deleted",
            "push.after_durable",
            "push.after_apply",
        }
        for name, next_wave, copy, history in taken:
            again = Cluster(copy, num_shards=1, history=history)
            again.settle()
            again.resume(next_wave)
            waves(again, 3 - next_wave)
            assert torch.equal(again.pull(3, 0)[0], ones(6.0)[0]), name
            assert again.lines(0) == cluster.lines(0), name
