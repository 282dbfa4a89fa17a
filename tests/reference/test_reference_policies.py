"""Equalities between weight policies in the reference executor, and with plain PyTorch (`policies.md`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.pairwise import all_pairs, every_nth
from tests.reference.executor import MinibatchRecord, ReferenceResult, ReferenceRun, run_reference
from tests.reference.policies import POLICIES
from tests.reference.test_reference import OPTIMIZERS, network_run, regression

FIVE_LAYERS = ((5,),)
THREE_STAGES = ((2, 1, 2),)

RUN = replace(network_run(torch.float64, "SGD", lr=0.05, momentum=0.9), sync="none", epochs=1)


def plain(run: ReferenceRun, batches: Iterator[Sequence[int]]) -> Mapping[str, Tensor]:
    """What a training loop on the whole model gives, with one step per batch of samples."""
    torch.manual_seed(run.seed)
    model = run.model()
    groups: list[dict[str, Any]] = [{"params": [p]} for p in model.parameters()]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, run.optimizer)(groups, **run.arguments)
    schedule = run.lr_schedule(optimizer) if run.lr_schedule else None
    for batch in batches:
        samples = [run.train[index] for index in batch]
        x, y = (torch.stack([sample[part] for sample in samples]) for part in (0, 1))
        optimizer.zero_grad()
        assert run.loss is not None
        torch.autograd.backward(run.loss(model(x), y))
        if run.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), run.max_norm, foreach=False)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def in_order(result: ReferenceResult) -> Iterator[Sequence[int]]:
    return (record.samples for record in result.minibatches.values())


def by_wave(result: ReferenceResult, n: int) -> Iterator[Sequence[int]]:
    """The samples of each wave of all virtual workers."""

    def wave(record: MinibatchRecord) -> int:
        return (record.p - 1) // n

    for _, records in groupby(result.minibatches.values(), wave):
        yield [index for record in records for index in record.samples]


def assert_same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0)


# --- equalities -------------------------------------------------------------------------------------------------------


def assert_is_plain_loop(run: ReferenceRun) -> None:
    """Bit for bit: without shards the optimizer steps the weights themselves, decay and all, over 25 minibatches."""
    run = replace(run, epochs=1)
    result = run_reference(run)
    assert len(result.minibatches) == 25
    assert_same_bits(result.weights, plain(run, in_order(result)))


@pytest.mark.parametrize(("optimizer", "arguments"), every_nth(6, OPTIMIZERS), ids=str)
@pytest.mark.parametrize("dtype", [pytest.param(torch.float64, marks=pytest.mark.exhaustive), torch.float32], ids=str)
def test_one_minibatch_per_wave_is_a_plain_loop(
    dtype: torch.dtype, optimizer: str, arguments: dict[str, object]
) -> None:
    assert_is_plain_loop(replace(network_run(dtype, optimizer, **arguments), sync="none", stages=THREE_STAGES))


NEVER_LOOKING_BACK = [
    (*policy, *optimizer)
    for policy in (
        ("wave", FIVE_LAYERS),
        ("flush", FIVE_LAYERS),
        ("flush", THREE_STAGES),
        ("stash", FIVE_LAYERS),
        ("vertical", FIVE_LAYERS),
        ("predict", FIVE_LAYERS),
    )
    for optimizer in (
        ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.05}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
        ("RMSprop", {"lr": 0.005, "weight_decay": 0.05}),
    )
]


@pytest.mark.parametrize(
    ("weights", "stages", "optimizer", "arguments"),
    all_pairs(NEVER_LOOKING_BACK, by=lambda weights, stages, optimizer, _: (weights, stages, optimizer)),
)
def test_a_pipeline_that_never_looks_back_is_a_plain_loop(
    weights: str, stages: tuple[tuple[int, ...], ...], optimizer: str, arguments: dict[str, object]
) -> None:
    run = network_run(torch.float32, optimizer, **arguments)
    assert_is_plain_loop(replace(run, sync="none", weights=weights, stages=stages))


def test_a_plain_loop_with_schedule_and_clipping() -> None:
    run = replace(
        RUN, stages=THREE_STAGES, max_norm=0.3, lr_schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)
    )
    result = run_reference(run)
    torch.testing.assert_close(result.weights, plain(run, in_order(result)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("optimizer", "arguments"), every_nth(6, OPTIMIZERS), ids=str)
@pytest.mark.parametrize("max_norm", [pytest.param(None, marks=pytest.mark.exhaustive), 0.2])
def test_replicas_that_average_gradients_are_one_process_on_the_concatenated_batch(
    max_norm: float | None, optimizer: str, arguments: dict[str, object]
) -> None:
    """98 samples in minibatches of 4: the last wave of an epoch is short on one side, its last minibatch ragged."""
    run = replace(
        network_run(torch.float64, optimizer, **arguments),
        sync="allreduce",
        weights="flush",
        stages=((2, 3),) * 2,
        num_virtual_workers=2,
        minibatches_per_wave=3,
        max_norm=max_norm,
    )
    result = run_reference(run)
    assert result.final.updates == (10, 10)
    # Rprop looks at signs alone, and Adafactor's rounding is coarse.
    torch.testing.assert_close(result.weights, plain(run, by_wave(result, 3)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("arguments", [{"lr": 0.1}, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}], ids=str)
def test_shards_that_average_are_one_process_on_the_concatenated_batch(arguments: dict[str, object]) -> None:
    run = replace(
        network_run(torch.float64, "SGD", **arguments),
        train=regression(96, torch.float64),
        weights="flush",
        combine="mean",
        num_virtual_workers=2,
        minibatches_per_wave=3,
    )
    result = run_reference(run)
    torch.testing.assert_close(result.weights, plain(run, by_wave(result, 3)), rtol=1e-9, atol=1e-9)


CUTS = [(5,), (2, 3), (1, 1, 3), (2, 2, 1)]


@pytest.mark.parametrize(
    ("weights", "sync"),
    every_nth(
        2,
        [
            ("wave", "none"),
            ("wave", "wsp"),
            ("vertical", "wsp"),
            ("vertical", "none"),
            ("double_buffer", "none"),
            ("double_buffer", "wsp"),
            ("double_buffer", "allreduce"),
            ("flush", "none"),
            ("flush", "wsp"),
            ("flush", "allreduce"),
        ],
    ),
)
def test_another_partition_gives_the_same_bits(weights: str, sync: Any) -> None:
    cuts = [cut for cut in CUTS if weights != "vertical" or len(cut) == 3]
    workers = 1 if sync == "none" else 2
    decay = 0.01
    run = replace(
        network_run(torch.float32, "AdamW", lr=0.01, weight_decay=decay),
        sync=sync,
        weights=weights,
        num_virtual_workers=workers,
        minibatches_per_wave=4,
        max_norm=0.5,
    )
    results = [run_reference(replace(run, stages=(cut,) * workers)) for cut in cuts]
    for other in results[1:]:
        assert_same_bits(results[0].weights, other.weights)
        assert list(results[0].minibatches.values()) == list(other.minibatches.values())


@pytest.mark.parametrize("weights", ["stash", "predict", "spectrain"])
def test_another_partition_is_another_run_where_versions_depend_on_the_stage(weights: str) -> None:
    run = replace(RUN, weights=weights, minibatches_per_wave=3)
    left, right = (run_reference(replace(run, stages=stages)) for stages in (((1, 1, 3),), ((2, 2, 1),)))
    assert any(not torch.equal(w, right.weights[name]) for name, w in left.weights.items())


@pytest.mark.parametrize(
    "other", [{"weights": "flush"}, {"weights": "wave", "accumulate": 1}, {"weights": "stash", "stages": FIVE_LAYERS}]
)
def test_policies_meet_where_their_equations_do(other: dict[str, Any]) -> None:
    """K = 1, N = 1: nobody sees anything but the newest weights."""
    run = replace(RUN, weights="vertical", stages=FIVE_LAYERS)
    assert_same_bits(run_reference(run).weights, run_reference(replace(run, **other)).weights)


@pytest.mark.parametrize("weights", POLICIES)
def test_shards_with_one_worker_change_nothing_but_rounding(weights: str) -> None:
    """V = 1, D = 0, decay and groups of two minibatches too: anchored and direct arithmetic are the same formulas."""
    run = replace(
        RUN,
        arguments={"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
        weights=weights,
        stages=THREE_STAGES,
        minibatches_per_wave=4,
        accumulate=1 if POLICIES[weights].once_per_wave else 2,
        checkpoint_every_waves=3,
        epochs=2,
    )
    direct, anchored = run_reference(run), run_reference(replace(run, sync="wsp"))
    torch.testing.assert_close(direct.weights, anchored.weights, rtol=1e-10, atol=1e-12)
    assert direct.final.updates == anchored.final.updates


# --- resuming and refusing --------------------------------------------------------------------------------------------


def decreasing(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30)


@pytest.mark.parametrize(
    ("weights", "sync"),
    [
        *((weights, ("none", "wsp")[number % 2]) for number, weights in enumerate(POLICIES)),
        *(
            pytest.param(weights, ("wsp", "none")[number % 2], marks=pytest.mark.exhaustive)
            for number, weights in enumerate(POLICIES)
        ),
        ("double_buffer", "allreduce"),
        ("flush", "allreduce"),
    ],
)
def test_going_on_from_any_barrier_gives_the_same_bits(weights: str, sync: Any) -> None:
    """With everything that has a position: velocity, last gradients, learning rate, groups cut short by barriers."""
    workers = 1 if sync == "none" else 2
    run = replace(
        network_run(torch.float32, "SGD", lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        sync=sync,
        weights=weights,
        stages=((2, 1, 2),) * workers,
        num_virtual_workers=workers,
        minibatches_per_wave=4,
        accumulate=1 if POLICIES[weights].once_per_wave else 2,
        staleness=1,
        max_norm=0.5,
        clip="stage",
        groups=((("*.bias",), {"weight_decay": 0.0, "lr": 0.1}),),
        lr_schedule=decreasing,
        checkpoint_every_waves=2,
        epochs=1,
    )
    whole = run_reference(run)
    for clock, state in whole.barriers.items():
        rest = run_reference(run, start=state)
        assert_same_bits(rest.weights, whole.weights)
        torch.testing.assert_close(rest.final.optimizers, whole.final.optimizers, rtol=0, atol=0)
        torch.testing.assert_close(rest.final.last_gradients, whole.final.last_gradients, rtol=0, atol=0)
        assert rest.final.updates == whole.final.updates
        assert rest.minibatches == {key: r for key, r in whole.minibatches.items() if (r.p - 1) // 4 >= clock}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": "stale"}, "weights is stale; it must be one of wave, stash"),
        ({"sync": "ring"}, "sync is ring"),
        ({"clip": "layer"}, "clip is layer"),
        ({"max_norm": 0.0}, "max_norm is 0.0; it must be above 0"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"accumulate": 2, "minibatches_per_wave": 3}, "must divide minibatches_per_wave, 3"),
        ({"accumulate": 2, "minibatches_per_wave": 2, "weights": "flush"}, "be 1 under a policy that makes one"),
        ({"stages": ((2, 3), (5,))}, "give 1 virtual workers stages"),
        ({"stages": ((0, 5),)}, "at least one layer each"),
        ({"stages": ((2, 2),)}, "have 4 together, but the model has 5"),
        ({"weights": "stash", "stages": ((2, 3),)}, "stash needs at least as many as there are stages, 2"),
        ({"num_virtual_workers": 2}, "sync none is for one"),
        ({"sync": "allreduce"}, "allreduce averages whole waves"),
        (
            {"sync": "allreduce", "weights": "flush", "num_virtual_workers": 2, "stages": ((2, 3), (3, 2))},
            "allreduce needs equal replicas",
        ),
        ({"weights": "predict", "max_norm": 1.0}, "clip is global; under predict"),
        ({"weights": "predict", "optimizer": "Adagrad", "arguments": {}}, "predict has no rule for the optimizer"),
        ({"weights": "spectrain", "optimizer": "Adam", "arguments": {}}, "spectrain predicts SGD with momentum only"),
        ({"weights": "spectrain", "arguments": {"lr": 0.1}}, "spectrain predicts SGD with momentum only"),
        ({"weights": "spectrain", "groups": ((("*.bias",), {"momentum": 0.0}),)}, "momentum only"),
    ],
)
def test_what_cannot_be_run_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_reference(replace(RUN, **change))
