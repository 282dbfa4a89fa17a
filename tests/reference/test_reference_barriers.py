"""What the reference executor does at barriers: division of the data, buffers, randomness, resuming, evaluation."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from hetpipe.decide.sync.division import deal, shuffled
from hetpipe.pipeline.seeds import layer_seed
from hetpipe.values.ids import Clock, LayerIndex, Minibatch, VirtualWorkerIndex
from tests.reference.executor import ReferenceResult, ReferenceRun, ReferenceState, evaluate, run_reference


def classifier() -> nn.Module:
    """Everything that has state or draws random numbers."""
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def labelled(num_samples: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 5, generator=generator)
    return TensorDataset(x, torch.randint(3, (num_samples,), generator=generator))


RUN = ReferenceRun(
    model=classifier,
    loss=nn.functional.cross_entropy,
    train=labelled(46),
    batch_size=4,
    seed=11,
    optimizer="SGD",
    arguments={"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    num_virtual_workers=2,
    minibatches_per_wave=2,
    staleness=1,
    epochs=3,
)


def assert_same_state(left: ReferenceState, right: ReferenceState) -> None:
    """Bit for bit."""
    assert (left.clock, left.epoch, left.used) == (right.clock, right.epoch, right.used)
    assert (left.minibatches, left.samples) == (right.minibatches, right.samples)
    torch.testing.assert_close(left.weights, right.weights, rtol=0, atol=0)
    torch.testing.assert_close(left.buffers, right.buffers, rtol=0, atol=0)
    torch.testing.assert_close(left.optimizers, right.optimizers, rtol=0, atol=0)


def minibatch_numbers(result: ReferenceResult) -> dict[int, list[int]]:
    """For every virtual worker, its p in order."""
    numbers: dict[int, list[int]] = {}
    for vw, p in result.minibatches:
        numbers.setdefault(vw, []).append(p)
    return numbers


# --- division of the data ---------------------------------------------------------------------------------------------


def test_short_and_empty_waves_end_an_epoch_and_numbering_goes_on_at_the_next_multiple() -> None:
    """5 blocks, 3 and 2 of them: the second wave is short on one side and empty on the other."""
    result = run_reference(replace(RUN, train=labelled(18), epochs=2))
    assert minibatch_numbers(result) == {0: [1, 2, 3, 5, 6, 7], 1: [1, 2, 5, 6]}
    assert list(result.barriers) == [0, 2, 4]
    assert [state.epoch for state in result.barriers.values()] == [0, 1, 2]
    assert (result.final.minibatches, result.final.samples) == (10, 36)
    last_blocks = [r.samples for r in result.minibatches.values() if len(r.samples) < RUN.batch_size]
    assert [len(block) for block in last_blocks] == [2, 2]


def test_a_segment_deals_the_unused_samples_as_written_in_the_specification() -> None:
    result = run_reference(replace(RUN, checkpoint_every_waves=1, epochs=2))
    members = [VirtualWorkerIndex(0), VirtualWorkerIndex(1)]
    for clock, state in list(result.barriers.items())[:-1]:
        unused = sorted(set(range(46)) - state.used)
        order = shuffled(unused, seed=11, epoch=state.epoch, barrier=clock)
        dealt = deal(order, batch_size=4, members=members, limit=None)
        for vw in members:
            segment = [r.samples for r in result.minibatches.values() if r.vw == vw and (r.p - 1) // 2 == clock]
            assert segment == list(dealt[vw][:2])


@pytest.mark.parametrize("every", [None, 1, 2, 5])
@pytest.mark.parametrize("vws", [1, 2, 3])
def test_every_sample_counts_once_per_epoch(every: int | None, vws: int) -> None:
    result = run_reference(replace(RUN, checkpoint_every_waves=every, num_virtual_workers=vws))
    uses = Counter(index for record in result.minibatches.values() for index in record.samples)
    assert uses == dict.fromkeys(range(46), 3)
    if every:
        assert set(range(0, result.final.clock, every)) <= set(result.barriers)


@pytest.mark.parametrize("total", [1, 7, 12, 25])
def test_a_run_given_by_minibatches_has_exactly_that_many(total: int) -> None:
    result = run_reference(replace(RUN, epochs=None, total_minibatches=total))
    assert len(result.minibatches) == result.final.minibatches == total


def test_batches_larger_than_the_data_are_one_short_block() -> None:
    result = run_reference(replace(RUN, batch_size=100, epochs=2))
    assert minibatch_numbers(result) == {0: [1, 3]}
    assert result.clocks == {0: 2, 1: 2}


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "arguments"),
    [
        ("SGD", {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
        ("AdamW", {"lr": 0.01}),
        ("Adagrad", {"lr": 0.01}),
        ("Adafactor", {"lr": 0.01}),
    ],
)
def test_going_on_from_any_barrier_gives_the_same_bits(optimizer: str, arguments: dict[str, object]) -> None:
    run = replace(RUN, optimizer=optimizer, arguments=arguments, checkpoint_every_waves=2)
    whole = run_reference(run)
    for clock, state in whole.barriers.items():
        rest = run_reference(run, start=state)
        assert_same_state(rest.final, whole.final)
        assert list(rest.barriers) == [c for c in whole.barriers if c >= clock]
        assert rest.minibatches == {key: r for key, r in whole.minibatches.items() if (r.p - 1) // 2 >= clock}


def test_stopping_and_resuming_equals_an_uninterrupted_run_with_the_same_barriers() -> None:
    stopped = run_reference(replace(RUN, stop_at_clock=4))
    assert (stopped.final.clock, list(stopped.barriers)) == (4, [0, 3, 4])
    resumed = run_reference(RUN, start=stopped.final)
    whole = run_reference(replace(RUN, extra_barriers=(4,)))
    assert_same_state(resumed.final, whole.final)
    assert {**stopped.minibatches, **resumed.minibatches} == whole.minibatches
    assert list(whole.barriers) == [0, 3, 4, 6, 9]


def test_a_finished_run_goes_no_further() -> None:
    final = run_reference(RUN).final
    again = run_reference(RUN, start=final)
    assert again.final is final
    assert not again.minibatches


def test_a_state_of_another_number_of_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="start has 2 virtual workers, the run 3"):
        run_reference(replace(RUN, num_virtual_workers=3), start=run_reference(RUN).final)


# --- buffers ----------------------------------------------------------------------------------------------------------


def test_buffers_are_averaged_at_a_barrier_and_local_before_it() -> None:
    """BatchNorm's running mean is 0.9·old + 0.1·batch mean, its counter counts minibatches."""
    values = torch.arange(12, dtype=torch.float64).reshape(12, 1)
    run = replace(
        RUN,
        model=lambda: nn.Sequential(nn.BatchNorm1d(1).double()),
        loss=nn.functional.mse_loss,
        train=TensorDataset(values, values),
        batch_size=4,
        minibatches_per_wave=4,
        epochs=2,
    )
    result = run_reference(run)
    expected = torch.zeros(1, dtype=torch.float64)
    for epoch in range(2):
        own = []
        for vw in range(2):
            mean = expected
            for record in result.minibatches.values():
                if record.vw == vw and (record.p - 1) // 4 == epoch:
                    mean = 0.9 * mean + 0.1 * values[list(record.samples)].mean(0)
            own.append(mean)
        expected = (own[0] + own[1]) * 0.5
        state = result.barriers[Clock(epoch + 1)]
        torch.testing.assert_close(state.buffers["0.running_mean"], expected, rtol=1e-12, atol=0)
        # VW 0 did two minibatches per epoch, VW 1 one; after the barrier both count on from the maximum.
        assert state.buffers["0.num_batches_tracked"].item() == 2 * (epoch + 1)


class Flags(nn.Module):
    """A boolean buffer and a constant one."""

    flags: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("table", torch.tensor([0.5, 0.25]), persistent=False)
        self.w = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


class Last(nn.Module):
    """Remembers the last input in an integer buffer."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros((), dtype=torch.int64))
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.last.copy_(x[-1])
        return x * self.w


def test_an_integer_buffer_becomes_the_maximum_over_the_workers() -> None:
    samples = [(torch.tensor(float(i)), torch.tensor(0.0)) for i in range(8)]
    run = replace(
        RUN, model=lambda: nn.Sequential(Last()), loss=nn.functional.mse_loss, train=samples, minibatches_per_wave=1
    )
    result = run_reference(replace(run, arguments={"lr": 0.0}, num_virtual_workers=3, batch_size=2, epochs=6))
    largest_workers = set()
    for clock, state in list(result.barriers.items())[1:]:
        segment = {r.vw: r.samples[-1] for r in result.minibatches.values() if r.p in (clock - 1, clock)}
        assert state.buffers["0.last"].item() == max(segment.values())
        largest_workers.add(max(segment, key=lambda vw: segment[vw]))
    assert largest_workers == {0, 1, 2}


def test_buffers_of_every_kind_go_through_a_barrier() -> None:
    result = run_reference(
        replace(RUN, model=lambda: nn.Sequential(Flags(), nn.Linear(5, 3)), num_virtual_workers=2, epochs=1)
    )
    assert result.buffers["0.flags"].tolist() == [True, False]
    assert result.buffers["0.table"].tolist() == [0.5, 0.25]


# --- randomness -------------------------------------------------------------------------------------------------------


def test_a_run_repeats_itself_and_leaves_the_random_generator_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = run_reference(RUN)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = run_reference(RUN)
    assert_same_state(first.final, second.final)
    assert first.minibatches == second.minibatches


def test_another_seed_gives_another_run() -> None:
    assert run_reference(replace(RUN, seed=12)).minibatches != run_reference(RUN).minibatches


def test_dropout_draws_from_the_seed_of_its_layer_and_minibatch() -> None:
    """The loss is the mean of the dropout mask (scaled by 2), so it can be drawn again."""
    run = replace(
        RUN,
        model=lambda: nn.Sequential(nn.Identity(), nn.Dropout(0.5), Flags()),
        loss=lambda output, target: output.mean() + 0 * target.sum(),
        train=TensorDataset(torch.ones(46, 5), torch.zeros(46)),
        arguments={"lr": 0.0},
        epochs=1,
    )
    for (vw, p), record in run_reference(run).minibatches.items():
        torch.manual_seed(layer_seed(run.seed, vw, p, LayerIndex(1)))
        mask = nn.functional.dropout(torch.ones(len(record.samples), 5), 0.5)
        assert record.loss == mask.mean().item()


class Augmented:
    """Samples that are read at random."""

    def __len__(self) -> int:
        return 46

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        return torch.randn(5) + index, index % 3


def test_random_augmentation_is_repeated() -> None:
    run = replace(RUN, train=Augmented(), checkpoint_every_waves=2)
    whole = run_reference(run)
    assert_same_state(run_reference(run, start=whole.barriers[Clock(2)]).final, whole.final)


def test_several_inputs_go_in_as_a_flat_tuple() -> None:
    class Join(nn.Module):
        def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            return x + positions.unsqueeze(1), positions

    class Project(nn.Linear):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * (positions >= 0).unsqueeze(1)

    base = labelled(46)
    samples = [((x, torch.tensor(i)), y) for i, (x, y) in enumerate(base)]
    result = run_reference(replace(RUN, model=lambda: nn.Sequential(Join(), Project(5, 3)), train=samples, epochs=1))
    assert result.minibatches[VirtualWorkerIndex(0), Minibatch(1)].loss > 0


# --- evaluation -------------------------------------------------------------------------------------------------------


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float().mean()


@pytest.mark.parametrize("vws", [1, 2, 3])
def test_evaluation_is_a_mean_over_all_samples_in_eval_mode(vws: int) -> None:
    run = replace(RUN, num_virtual_workers=vws, epochs=1)
    result = run_reference(run)
    held_out = labelled(30)
    outcome = evaluate(
        run, weights=result.weights, buffers=result.buffers, dataset=held_out, metrics={"accuracy": accuracy}
    )
    model = classifier()
    model.load_state_dict({**result.weights, **result.buffers})
    model.eval()
    x, y = held_out.tensors
    with torch.no_grad():
        output = model(x)
    assert outcome.samples == 30
    assert outcome.means["loss"] == pytest.approx(nn.functional.cross_entropy(output, y).item(), rel=1e-6)
    assert outcome.means["accuracy"] == pytest.approx(accuracy(output, y).item(), rel=1e-6)
