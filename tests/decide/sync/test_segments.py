"""Division of the data and the segments of a run (`wsp.md` §5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetpipe.decide.sync.division import (
    blocks_of_evaluation,
    deal,
    empty_bitmap,
    shuffled,
    unused,
    with_used,
)
from hetpipe.decide.sync.segment import (
    CHECKPOINT,
    END,
    EPOCH,
    Segment,
    advance,
    divide,
    first_progress,
    is_finished,
    plan_segment,
    planned_lengths,
    planned_segments,
)
from hetpipe.values.freezing import FreezeChange, FreezeLineup, Freezing, LineupWorker
from hetpipe.values.ids import Clock, VirtualWorkerIndex
from hetpipe.values.requests import Blocks
from hetpipe.values.sync import DataSpec, Progress


def members(count: int) -> list[VirtualWorkerIndex]:
    """Virtual workers 0 … count − 1."""
    return [VirtualWorkerIndex(vw) for vw in range(count)]


def spec(
    num_samples: int, batch_size: int, *, epochs: int | None = 1, total: int | None = None, seed: int = 5
) -> DataSpec:
    """By epochs, or by minibatches if `total` is given."""
    return DataSpec(num_samples, batch_size, seed, None if total is not None else epochs, total)


#: N_v of up to four virtual workers.
WAVES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def by_member(waves: Sequence[int]) -> dict[VirtualWorkerIndex, int]:
    return {VirtualWorkerIndex(vw): n for vw, n in enumerate(waves)}


class TestDivision:
    @given(
        num_samples=st.integers(1, 70),
        batch_size=st.integers(1, 9),
        count=st.integers(1, 5),
        used=st.sets(st.integers(0, 69)),
    )
    def test_every_unused_sample_is_dealt_once(
        self, num_samples: int, batch_size: int, count: int, used: set[int]
    ) -> None:
        used = {index for index in used if index < num_samples}
        bitmap = with_used(empty_bitmap(num_samples), sorted(used))
        progress = Progress(Clock(2), 1, bitmap, 3, len(used))
        dealt = divide(progress, spec(num_samples, batch_size, epochs=3), members(count))
        samples = [index for blocks in dealt.values() for block in blocks for index in block]
        assert sorted(samples) == sorted(set(range(num_samples)) - used) == unused(bitmap, num_samples)
        sizes = [len(block) for blocks in dealt.values() for block in blocks]
        assert all(size == batch_size for size in sizes if size != min(sizes))
        assert sum(size < batch_size for size in sizes) <= 1, "only the last block is short"
        lengths = [len(dealt[vw]) for vw in members(count)]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] - lengths[-1] <= 1

    @given(
        waves=WAVES,
        homes=st.lists(st.integers(0, 2), min_size=0, max_size=5),
        batch_size=st.integers(1, 9),
        used=st.sets(st.integers(0, 69)),
    )
    def test_samples_of_a_node_are_dealt_there(
        self, waves: list[int], homes: list[int], batch_size: int, used: set[int]
    ) -> None:
        """In each epoch the same; blocks have the sizes and members that they have without, all unused samples once."""
        data, per_wave = spec(70, batch_size, epochs=3), by_member(waves)
        at_nodes = replace(data, homes=tuple(homes))
        owners = []
        for epoch in range(2):
            progress = Progress(Clock(2), epoch, with_used(empty_bitmap(70), sorted(used)), 3, len(used))
            plain, dealt = (divide(progress, each, tuple(per_wave), per_wave) for each in (data, at_nodes))
            assert {vw: [len(block) for block in own] for vw, own in dealt.items()} == {
                vw: [len(block) for block in own] for vw, own in plain.items()
            }
            home_of = {
                sample: homes[vw] if vw < len(homes) else len(homes)
                for vw, own in dealt.items()
                for block in own
                for sample in block
            }
            assert sorted(home_of) == sorted(set(range(70)) - used)
            owners.append(home_of if homes else {})
        assert owners[0] == owners[1]

    @given(order=st.permutations(range(20)), used=st.sets(st.integers(0, 19)))
    def test_an_order_of_the_job_is_kept_by_what_is_left(self, order: list[int], used: set[int]) -> None:
        progress = Progress(Clock(2), 1, with_used(empty_bitmap(20), sorted(used)), 3, len(used))
        dealt = divide(progress, spec(20, 3, epochs=3), members(1), order=order)
        assert [i for block in dealt[VirtualWorkerIndex(0)] for i in block] == [i for i in order if i not in used]

    def test_blocks_go_round_in_index_order(self) -> None:
        dealt = deal(
            [9, 8, 7, 6, 5, 4, 3], batch_size=2, members=[VirtualWorkerIndex(4), VirtualWorkerIndex(7)], limit=None
        )
        assert dealt == {4: ((9, 8), (5, 4)), 7: ((7, 6), (3,))}
        cut = deal([9, 8, 7, 6, 5, 4, 3], batch_size=2, members=members(2), limit=3)
        assert cut == {0: ((9, 8), (5, 4)), 1: ((7, 6),)}

    @given(waves=WAVES, num_blocks=st.integers(0, 60))
    def test_blocks_are_dealt_in_proportion(self, waves: list[int], num_blocks: int) -> None:
        """Whoever would complete a block first if waves took equally long gets it: no division ends earlier."""
        order, per_wave = range(num_blocks), by_member(waves)
        dealt = deal(order, batch_size=1, members=tuple(per_wave), limit=None, per_wave=per_wave)
        assert sorted(index for blocks in dealt.values() for (index,) in blocks) == list(order)
        whole, rest = divmod(num_blocks, sum(waves))
        for vw, n in per_wave.items():
            assert whole * n <= len(dealt[vw]) <= whole * n + min(n, rest)
            end = Fraction(len(dealt[vw]), n)
            assert all(end <= Fraction(len(dealt[other]) + 1, m) for other, m in per_wave.items())

    @given(count=st.integers(1, 4), n=st.integers(1, 5), num_blocks=st.integers(0, 40))
    def test_equal_waves_are_dealt_as_ever(self, count: int, n: int, num_blocks: int) -> None:
        order, each = range(num_blocks), members(count)
        plain = deal(order, batch_size=1, members=each, limit=None)
        assert deal(order, batch_size=1, members=each, limit=None, per_wave=dict.fromkeys(each, n)) == plain

    def test_a_wave_longer_than_the_data_is_not_listed(self) -> None:
        huge = {VirtualWorkerIndex(0): 10**15, VirtualWorkerIndex(1): 2 * 10**15}
        dealt = deal(range(3), batch_size=1, members=tuple(huge), limit=None, per_wave=huge)
        assert dealt == {0: ((1,),), 1: ((0,), (2,))}

    def test_the_order_depends_on_seed_epoch_and_barrier_and_on_nothing_else(self) -> None:
        orders = {
            (seed, epoch, barrier): tuple(shuffled(range(40), seed=seed, epoch=epoch, barrier=Clock(barrier)))
            for seed in (0, 1)
            for epoch in (0, 1)
            for barrier in (0, 1)
        }
        assert len(set(orders.values())) == 8
        assert all(sorted(order) == list(range(40)) for order in orders.values())

    def test_the_order_is_the_same_on_every_machine(self) -> None:
        assert shuffled(range(8), seed=3, epoch=1, barrier=Clock(4)) == [1, 5, 4, 0, 6, 2, 3, 7]

    @given(st.sets(st.integers(0, 99)), st.integers(1, 100))
    def test_bitmaps(self, samples: set[int], num_samples: int) -> None:
        samples = {index for index in samples if index < num_samples}
        bitmap = with_used(empty_bitmap(num_samples), sorted(samples))
        assert len(bitmap) == -(-num_samples // 8)
        assert unused(bitmap, num_samples) == [i for i in range(num_samples) if i not in samples]
        assert int.from_bytes(bitmap, "little") == sum(1 << index for index in samples)

    @pytest.mark.parametrize("count", [1, 2, 3])
    @pytest.mark.parametrize("num_samples", [0, 1, 7, 8, 9, 24])
    def test_evaluation_takes_every_sample_once(self, num_samples: int, count: int) -> None:
        parts = [blocks_of_evaluation(num_samples, 4, place=place, num_members=count) for place in range(count)]
        assert sorted(i for blocks in parts for block in blocks for i in block) == list(range(num_samples))


class TestPlan:
    @pytest.mark.parametrize(
        ("samples", "batch", "count", "n", "every", "end", "reasons"),
        [
            (20, 2, 2, 2, None, 3, (EPOCH, END)),
            (20, 2, 2, 2, 2, 2, (CHECKPOINT,)),
            (20, 2, 2, 2, 3, 3, (CHECKPOINT, EPOCH, END)),
            (20, 2, 2, 2, 4, 3, (EPOCH, END)),
            (20, 2, 2, 5, 1, 1, (CHECKPOINT, EPOCH, END)),
            (1, 8, 3, 4, None, 1, (EPOCH, END)),
            (21, 2, 1, 1, None, 11, (EPOCH, END)),
        ],
    )
    def test_the_first_segment(
        self, *, samples: int, batch: int, count: int, n: int, every: int | None, end: int, reasons: tuple[str, ...]
    ) -> None:
        data = spec(samples, batch)
        segment = plan_segment(first_progress(data), data, minibatches_in_wave=count * n, checkpoint_every_waves=every)
        assert (segment.start, segment.end, segment.reasons, segment.epoch) == (0, end, reasons, 0)
        assert segment.reason == "+".join(reasons)

    def test_an_epoch_that_is_not_the_last(self) -> None:
        data = spec(8, 2, epochs=2)
        segment = plan_segment(first_progress(data), data, minibatches_in_wave=2, checkpoint_every_waves=None)
        assert segment.reasons == (EPOCH,)

    def test_minibatches_end_a_run_within_an_epoch_and_at_its_end(self) -> None:
        """10 blocks an epoch; 4 left of the run, or 10."""
        data = spec(20, 2, total=14)
        for done, end, reasons in [(10, 6, (END,)), (4, 7, (EPOCH, END)), (3, 7, (EPOCH,)), (14, 5, (END,))]:
            progress = Progress(Clock(5), 1, empty_bitmap(20), done, 2 * done)
            segment = plan_segment(progress, data, minibatches_in_wave=6, checkpoint_every_waves=None)
            assert (segment.end, segment.reasons) == (end, reasons)
            assert is_finished(progress, data) == (done == 14)

    def test_a_checkpoint_is_due_at_multiples_whatever_the_segment_began_with(self) -> None:
        data = spec(1000, 1)
        for start, due in [(0, 4), (3, 4), (4, 8), (7, 8)]:
            progress = Progress(Clock(start), 0, empty_bitmap(1000), 0, 0)
            segment = plan_segment(progress, data, minibatches_in_wave=1, checkpoint_every_waves=4)
            assert (segment.end, segment.reasons) == (due, (CHECKPOINT,))

    def test_advance_turns_the_epoch_when_every_sample_is_used(self) -> None:
        data = spec(10, 3, epochs=2)
        middle = advance(first_progress(data), data, clock=Clock(2), samples=range(7), minibatches=3)
        assert middle == Progress(Clock(2), 0, with_used(empty_bitmap(10), range(7)), 3, 7)
        after = advance(middle, data, clock=Clock(3), samples=(9, 7, 8), minibatches=1)
        assert after == Progress(Clock(3), 1, empty_bitmap(10), 4, 10)
        assert not is_finished(after, data)
        assert is_finished(advance(after, data, clock=Clock(6), samples=range(10), minibatches=4), data)


class TestWholeRuns:
    @given(
        num_samples=st.integers(1, 50),
        batch_size=st.integers(1, 6),
        waves=WAVES,
        every=st.none() | st.integers(1, 4),
        epochs=st.integers(1, 3),
    )
    def test_epochs(
        self, *, num_samples: int, batch_size: int, waves: list[int], every: int | None, epochs: int
    ) -> None:
        data = spec(num_samples, batch_size, epochs=epochs)
        used: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(epochs)}
        clock = 0
        for segment, blocks in planned_segments(
            first_progress(data), data, per_wave=by_member(waves), checkpoint_every_waves=every
        ):
            assert segment.start == clock < segment.end
            clock = segment.end
            assert every is None or segment.end - segment.start <= every
            assert (CHECKPOINT in segment.reasons) == (every is not None and segment.end % every == 0)
            samples = [index for dealt in blocks.values() for block in dealt for index in block]
            assert samples, "a segment has something to do"
            used[segment.epoch].update(samples)
            complete = used[segment.epoch] == Counter(range(num_samples))
            assert (EPOCH in segment.reasons) == complete
            assert (END in segment.reasons) == (complete and segment.epoch == epochs - 1)
            lengths = [-(-len(dealt) // n) for dealt, n in zip(blocks.values(), waves, strict=True)]
            assert segment.end - segment.start == max(lengths), "no wave is empty for everyone"
        assert all(counts == Counter(range(num_samples)) for counts in used.values())

    @given(
        num_samples=st.integers(1, 30),
        batch_size=st.integers(1, 6),
        waves=WAVES,
        every=st.none() | st.integers(1, 4),
        minibatches=st.integers(1, 25),
    )
    def test_minibatches(
        self, *, num_samples: int, batch_size: int, waves: list[int], every: int | None, minibatches: int
    ) -> None:
        total = minibatches * len(waves)
        data = spec(num_samples, batch_size, total=total)
        segments = list(
            planned_segments(first_progress(data), data, per_wave=by_member(waves), checkpoint_every_waves=every)
        )
        done = [block for _, blocks in segments for dealt in blocks.values() for block in dealt]
        assert len(done) == total
        assert [END in segment.reasons for segment, _ in segments] == [False] * (len(segments) - 1) + [True]
        epochs = self.by_epoch(segments)
        for epoch, counts in epochs.items():
            assert set(counts.values()) == {1}
            assert epoch == max(epochs) or len(counts) == num_samples

    @given(
        num_samples=st.integers(1, 50),
        batch_size=st.integers(1, 6),
        waves=WAVES,
        every=st.none() | st.integers(1, 4),
        bound=st.integers(1, 25),
        in_epochs=st.booleans(),
    )
    def test_lengths_are_those_of_the_segments(
        self, *, num_samples: int, batch_size: int, waves: list[int], every: int | None, bound: int, in_epochs: bool
    ) -> None:
        epochs, total = (1 + bound % 3, None) if in_epochs else (None, bound * len(waves))
        data = spec(num_samples, batch_size, epochs=epochs, total=total)
        segments = planned_segments(first_progress(data), data, per_wave=by_member(waves), checkpoint_every_waves=every)
        found = planned_lengths(first_progress(data), data, per_wave=waves, checkpoint_every_waves=every)

        assert [(length.minibatches, length.samples) for length in found] == [
            (
                -(-sum(map(len, blocks.values())) // len(waves)),
                sum(len(block) for dealt in blocks.values() for block in dealt),
            )
            for _, blocks in segments
        ]

    @staticmethod
    def by_epoch(segments: Sequence[tuple[Segment, Mapping[VirtualWorkerIndex, Blocks]]]) -> dict[int, Counter[int]]:
        """How often each sample was used, per epoch."""
        found: dict[int, Counter[int]] = {}
        for segment, blocks in segments:
            for dealt in blocks.values():
                for block in dealt:
                    found.setdefault(segment.epoch, Counter()).update(block)
        return found


def test_others_train_from_the_barrier_after_the_one_at_which_layers_freeze() -> None:
    """One virtual worker with waves of 4 minibatches, and once a layer is frozen two with waves of 2."""
    data = DataSpec(num_samples=24, batch_size=2, seed=0, epochs=2, total_minibatches=None)
    first = FreezeLineup(0, (LineupWorker(VirtualWorkerIndex(0), (0, 1)),), 4)
    two = tuple(LineupWorker(VirtualWorkerIndex(vw), (vw - 1,)) for vw in (1, 2))
    freezing = Freezing((0, 1), (FreezeChange(1, epoch=1),), lineups=(first, FreezeLineup(1, two, 2)))
    lengths = planned_lengths(
        first_progress(data), data, per_wave=[4, 4, 4], checkpoint_every_waves=None, freezing=freezing
    )
    found = [(each.end, each.minibatches, each.samples, each.frozen_layers, each.lineup) for each in lengths]
    assert found == [(3, 12, 24, 0, 0), (4, 4, 8, 1, 0), (6, 4, 16, 1, 1)]
