"""Sums over replicas by gloo: between threads for what they compute, between processes for how they die."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import DeadlineExceeded, PeerUnreachable, UserError
from hetpipe.link.gloo import connect_rendezvous, serve_rendezvous
from hetpipe.link.replicas import DistributedReplicas, connect_replicas, have_own_gpus
from hetpipe.values.run import LinkTime
from tests.support.forked import fork_server_context
from tests.support.link_contract import in_thread

_HOST = "127.0.0.1"
_SECONDS = 20.0
_CPU = torch.device("cpu")


def connect(store: Any, vw: int, num_workers: int, stall_seconds: float, *, stage: int = 2) -> DistributedReplicas:
    return connect_replicas(
        store, stage=stage, vw=vw, members=range(num_workers), host=_HOST, device=_CPU, stall_seconds=stall_seconds
    )


def in_replicas(num_workers: int, body: Callable[[DistributedReplicas, int], None]) -> None:
    """Run `body` on every replica, each in a thread of its own, and raise what went wrong there."""
    store, address = serve_rendezvous(_HOST)

    def run(vw: int) -> None:
        replicas = connect(store if vw == 0 else connect_rendezvous(address), vw, num_workers, _SECONDS)
        body(replicas, vw)
        replicas.close()

    threads = [in_thread(lambda vw=vw: run(vw)) for vw in range(num_workers)]  # type: ignore[misc]
    for thread, outcome in threads:
        thread.join(_SECONDS)
        assert outcome == [None]


def mixed(vw: int) -> list[Tensor]:
    """Two dtypes in turn, a scalar, one without elements, one that is not contiguous."""
    return [
        torch.full((2, 3), float(vw + 1)),
        torch.tensor([1e-17 * (vw + 1), 2.0], dtype=torch.float64),
        torch.tensor(10.0 * vw),
        torch.empty(0, 4),
        torch.arange(6.0, dtype=torch.float64).reshape(2, 3).t() * (vw + 1),
    ]


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_the_sum_is_everywhere_in_place_and_in_its_own_dtype(num_workers: int) -> None:
    factor = sum(range(1, num_workers + 1))
    expected = mixed(0)
    for tensor, total in zip(expected, (factor, factor, factor - num_workers, 0, factor), strict=True):
        tensor.copy_(tensor * factor if tensor.dim() else torch.tensor(10.0 * total))
    expected[1][1] = 2.0 * num_workers

    def body(replicas: DistributedReplicas, vw: int) -> None:
        tensors = mixed(vw)
        places = [tensor.data_ptr() for tensor in tensors]
        for _ in range(2):  # a second call meets the second calls of the others
            replicas.sum_(tensors)
        assert [tensor.data_ptr() for tensor in tensors] == places
        for found, once in zip(tensors, expected, strict=True):
            torch.testing.assert_close(found, once * num_workers, rtol=1e-15, atol=0.0)

    in_replicas(num_workers, body)


def test_the_sum_is_the_same_bits_on_every_replica() -> None:
    found: dict[int, Tensor] = {}

    def body(replicas: DistributedReplicas, vw: int) -> None:
        found[vw] = torch.randn(1000, generator=torch.Generator().manual_seed(vw))
        replicas.sum_([found[vw]])

    in_replicas(3, body)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_an_emulated_sum_takes_the_time_of_its_ring() -> None:
    slept: list[float] = []

    done = SimpleNamespace(wait=lambda: True)
    group: Any = SimpleNamespace(allreduce=lambda _: done, size=lambda: 4)
    replicas = DistributedReplicas(group, "a stage", LinkTime(0.01, 1000.0), sleep=slept.append)
    replicas.sum_([torch.zeros(30), torch.zeros(5, dtype=torch.float64)])
    assert slept == [pytest.approx(6 * (0.01 + 0.04))], "160 bytes of both dtypes in 6 rounds of a quarter"


def test_the_first_ones_weights_are_copied_bit_for_bit() -> None:
    def body(replicas: DistributedReplicas, vw: int) -> None:
        tensors = mixed(vw)
        replicas.copy_first_(tensors)
        assert all(torch.equal(found, first) for found, first in zip(tensors, mixed(0), strict=True))

    in_replicas(3, body)


def test_stages_meet_their_own_replicas_only() -> None:
    """All stages of a virtual worker use the store of virtual worker 0."""
    store, address = serve_rendezvous(_HOST)
    sums: dict[tuple[int, int], float] = {}

    def run(stage: int, vw: int) -> None:
        replicas = connect(connect_rendezvous(address), vw, 2, _SECONDS, stage=stage)
        tensor = torch.tensor([10.0 * stage + vw])
        replicas.sum_([tensor])
        sums[stage, vw] = float(tensor)
        replicas.close()

    places = [(stage, vw) for stage in (0, 1) for vw in (0, 1)]
    threads = [in_thread(lambda place=place: run(*place)) for place in places]  # type: ignore[misc]
    for thread, outcome in threads:
        thread.join(_SECONDS)
        assert outcome == [None]
    del store
    assert sums == {(0, 0): 1.0, (0, 1): 1.0, (1, 0): 21.0, (1, 1): 21.0}


def test_nothing_to_sum() -> None:
    in_replicas(1, lambda replicas, _: replicas.sum_([]))


def test_a_replica_that_never_comes_is_missed_in_time() -> None:
    store, _ = serve_rendezvous(_HOST)
    began = SYSTEM_CLOCK.monotonic()
    with pytest.raises(
        DeadlineExceeded, match=r"^stage 2 of virtual worker 0 waited 0\.\d s for its replicas to connect \("
    ):
        connect(store, 0, 2, 0.3)
    assert SYSTEM_CLOCK.monotonic() - began < 5


def test_a_replica_that_does_not_call_is_missed_in_time() -> None:
    store, address = serve_rendezvous(_HOST)
    connected = threading.Event()
    done = threading.Event()

    def idle() -> None:
        replicas = connect(connect_rendezvous(address), 1, 2, 0.3)
        connected.set()
        done.wait(_SECONDS)
        replicas.close()

    thread, outcome = in_thread(idle)
    replicas = connect(store, 0, 2, 0.3)
    assert connected.wait(_SECONDS)
    with pytest.raises(
        DeadlineExceeded, match=r"^stage 2 of virtual worker 0 waited 0\.\d s for its replicas to add up gradients \("
    ):
        replicas.sum_([torch.ones(3)])
    done.set()
    thread.join(_SECONDS)
    assert outcome == [None]


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine(host: str) -> None:
    store, _ = serve_rendezvous(_HOST)
    with pytest.raises(UserError, match=f"cannot use the address {re.escape(host)} .* give an address of this machine"):
        connect_replicas(store, stage=0, vw=0, members=(0,), host=host, device=_CPU, stall_seconds=0.3)


# -- processes: this one is replica 0 --------------------------------------------------------------------------------


def _first_round(replicas: DistributedReplicas, vw: int) -> list[list[float]]:
    """Begin alike and add up; what was found."""
    weights, counts = torch.full((2,), vw + 1.0), torch.tensor([vw + 0.5], dtype=torch.float64)
    replicas.copy_first_([weights, counts])
    gradients = [torch.arange(3.0) + vw, torch.tensor([1.0 + 1e-12 * vw], dtype=torch.float64)]
    replicas.sum_(gradients)
    return [tensor.tolist() for tensor in (weights, counts, *gradients)]


def _second_round(replicas: DistributedReplicas) -> tuple[str, str, float] | None:
    """Add up once more; None, or how it failed, in one sentence and how many seconds."""
    began = SYSTEM_CLOCK.monotonic()
    try:
        replicas.sum_([torch.ones(3)])
    except (DeadlineExceeded, PeerUnreachable) as error:
        return type(error).__name__, str(error), SYSTEM_CLOCK.monotonic() - began
    return None


def _other_process(address: str, vw: int, num_workers: int, stall_seconds: float, pipe: Connection) -> None:
    torch.set_num_threads(1)
    replicas = connect(connect_rendezvous(address), vw, num_workers, stall_seconds)
    pipe.send(_first_round(replicas, vw))
    if pipe.recv() == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.send(_second_round(replicas))
    replicas.close()


def _spawned(address: str, num_workers: int, stall_seconds: float) -> tuple[list[BaseProcess], list[Connection]]:
    context = fork_server_context()  # torch is imported once, by whom they are forked from
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    for vw in range(1, num_workers):
        here, there = context.Pipe()
        arguments = (address, vw, num_workers, stall_seconds, there)
        processes.append(context.Process(target=_other_process, args=arguments, daemon=True))
        processes[-1].start()
        there.close()
        pipes.append(here)
    return processes, pipes


def _received(pipe: Connection) -> Any:
    assert pipe.poll(60), "the process says nothing"
    return pipe.recv()


def _found_by(num_workers: int) -> list[Any]:
    """What every one of them must find in the first round."""
    extra = sum(range(num_workers))
    sums = [float(num_workers * i + extra) for i in range(3)]
    return [[1.0, 1.0], [0.5], sums, [pytest.approx(num_workers + 1e-12 * extra, rel=1e-15)]]


@pytest.mark.processes
def test_two_processes_begin_alike_and_add_up() -> None:
    store, address = serve_rendezvous(_HOST)
    (process,), (pipe,) = _spawned(address, 2, 60.0)
    replicas = connect(store, 0, 2, 60.0)
    assert _first_round(replicas, 0) == _received(pipe) == _found_by(2)
    pipe.send("go on")
    assert _second_round(replicas) is None
    assert _received(pipe) is None
    process.join(_SECONDS)
    assert process.exitcode == 0
    replicas.close()


@pytest.mark.processes
def test_a_process_that_dies_is_noticed_by_all_others() -> None:
    """At once, long before the stall time is over, in a sentence that names the own stage."""
    stall_seconds = 60.0
    store, address = serve_rendezvous(_HOST)
    (dying, living), (to_dying, to_living) = _spawned(address, 3, stall_seconds)
    replicas = connect(store, 0, 3, stall_seconds)
    assert _first_round(replicas, 0) == _received(to_dying) == _received(to_living) == _found_by(3)
    to_dying.send("die")
    dying.join(_SECONDS)
    assert dying.exitcode == -signal.SIGKILL
    to_living.send("go on")
    for vw, outcome in ((0, _second_round(replicas)), (2, _received(to_living))):
        assert outcome is not None
        name, sentence, seconds = outcome
        assert name == "PeerUnreachable"
        assert re.match(rf"stage 2 of virtual worker {vw} waited \d+\.\d s for its replicas to add up", sentence)
        assert seconds < 10.0
    living.join(_SECONDS)
    replicas.close()


@pytest.mark.parametrize(
    ("gpus", "found"),
    [(("a", "b"), [True] * 2), (("a", "a"), [False] * 2), (("a", ""), [False] * 2), (("", ""), [False] * 2)],
    ids=["own", "shared", "one on a CPU device", "CPU devices"],
)
def test_nccl_needs_a_gpu_per_replica(
    gpus: tuple[str, str], found: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=gpus[device.index]))
    served, address = serve_rendezvous(_HOST)
    answers: dict[int, bool] = {}

    def ask(rank: int) -> None:
        store = connect_rendezvous(address) if rank else served
        device = torch.device("cuda", rank) if gpus[rank] else _CPU
        answers[rank] = have_own_gpus(store, rank, 2, device, timedelta(seconds=_SECONDS))

    thread, outcome = in_thread(lambda: ask(1))
    ask(0)
    thread.join(_SECONDS)
    assert outcome == [None]
    assert [answers[0], answers[1]] == found
