"""Every kind of network fault, alone and mixed: each wave counts exactly once, and no promise is broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetpipe import failpoints
from hetpipe.failpoints import POINTS, VARIABLE
from tests.numerics.compare import run
from tests.numerics.test_witnesses import case
from tests.pipeline.witness_run import judge
from tests.server.shard.through_proxy import Network, through_proxies
from tests.support.call_faults import Deed, Faults
from tests.support.grpc_proxy import GrpcProxy
from tests.support.lives import Death

pytestmark = pytest.mark.matrix

#: All calls but the streams of records, which go on for ever.
ASKED = "/*/[!F]*"


def train(folder: Path, rules: list[Faults], *, seed: int = 1, **options: Any) -> Network:
    """An epoch of witnesses on two shards; what history and weights say is what they say without faults."""
    whole = case(workers=2, stages=2, wave=1, batch_size=4, epochs=1, staleness=1, every_waves=4)
    with through_proxies(rules, seed=seed) as network:
        run(whole, folder, delay_seconds=0.0, **options)
        network.settle()
    judgement = judge(folder)
    assert judgement.ok, judgement.sentences()
    assert judgement.samples == 46
    return network


@pytest.mark.parametrize(
    ("rules", "deeds"),
    [
        pytest.param(  # both are part of the mix below
            [Faults(method="*/Push", break_request=0.3), Faults(drop_request=0.2)],
            {"REQUEST_BROKEN", "REQUEST_DROPPED"},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            [
                Faults(method="*/Pull", break_reply=0.3),
                Faults(method="*/FollowLog", break_reply=0.7),
                Faults(drop_reply=0.2),
            ],
            {"REPLY_BROKEN", "REPLY_DROPPED"},
            marks=pytest.mark.exhaustive,
        ),
        (
            [
                Faults(method=ASKED, repeat=0.3, repeat_late=0.3, hold_back=0.2, longest_delay_seconds=0.3),
                Faults(delay=0.5),
            ],
            {"REPEATED", "REPEATED_LATE", "HELD_BACK", "DELAYED"},
        ),
        (
            [Faults(method="*/Push", flip_request=0.5), Faults(method="*/Pull", flip_reply=0.5)],
            {"REQUEST_FLIPPED", "REPLY_FLIPPED"},
        ),
    ],
    ids=["requests lost", "replies lost", "repeated and late", "damaged"],
)
def test_each_fault(rules: list[Faults], deeds: set[str], tmp_path: Path) -> None:
    assert set(train(tmp_path, rules).deeds) == {Deed[name] for name in deeds}


MIX = [
    Faults(method="*/FollowLog", break_reply=0.3, drop_request=0.1, delay=0.2),
    Faults(
        method="*/Pu*",
        delay=0.1,
        drop_request=0.1,
        drop_reply=0.1,
        repeat=0.1,
        repeat_late=0.1,
        break_request=0.1,
        break_reply=0.1,
    ),
    Faults(delay=0.2, hold_back=0.1, drop_request=0.1, drop_reply=0.1, repeat=0.1, repeat_late=0.2),
]


def test_all_of_them_and_a_virtual_worker_that_dies(tmp_path: Path) -> None:
    """Its pushes may arrive when it has long been evicted."""
    deeds = train(tmp_path, MIX, deaths=(Death(vw=1, at="after push", number=3),)).deeds
    assert len(deeds) >= 6, deeds


def test_cut_off_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every twentieth call finds the connection cut, and the next one finds it healed; the replies alone, then all."""
    handler = GrpcProxy._handler
    calls = 0

    def now_and_then(proxy: GrpcProxy, method: str) -> object:
        nonlocal calls
        calls += 1
        if calls % 20 == 0:
            proxy.cut(replies_only=calls % 40 == 0)
        elif calls % 20 == 3:
            proxy.heal()
        return handler(proxy, method)

    monkeypatch.setattr(GrpcProxy, "_handler", now_and_then)
    assert train(tmp_path, []).deeds[Deed.CUT] > 3


def test_a_run_comes_to_the_failpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [name for name in POINTS if name.startswith(("push.", "pull.", "commit."))]
    entries = ",".join(f"{name}=error@1000000000" for name in wanted)
    monkeypatch.setattr(failpoints, "_armed", None)
    failpoints.arm({VARIABLE: entries}, is_allowed=True)
    armed = failpoints._armed
    assert armed is not None
    train(tmp_path, [])
    assert set(wanted) - set(armed._hits) <= {"push.after_durable"}
