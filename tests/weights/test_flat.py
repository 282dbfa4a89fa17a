"""Flat buffers: layout, arithmetic, the finite check, and who holds them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetpipe.values.alignment import ALIGNMENT_BYTES
from hetpipe.values.plan import DTYPE_BYTES
from hetpipe.weights.flat import BufferPool, FlatBuffer, FlatLayout, aligned, finite

CPU = torch.device("cpu")
FLOATS = ("float64", "float32", "float16", "bfloat16")

TENSORS = st.lists(
    st.tuples(st.lists(st.integers(0, 5), max_size=3).map(tuple), st.sampled_from(sorted(DTYPE_BYTES))), max_size=6
).map(lambda tensors: [(f"t{index}", shape, dtype) for index, (shape, dtype) in enumerate(tensors)])


def fill(buffer: FlatBuffer, seed: int) -> FlatBuffer:
    """Small integers in every tensor; sums of them are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    for view in buffer.views.values():
        view.copy_(torch.randint(0, 2, view.shape, generator=generator))
    return buffer


def gap_bytes(buffer: FlatBuffer) -> list[int]:
    """The bytes that belong to no tensor."""
    data = bytearray(buffer.memory())
    gaps: list[int] = []
    for slot in buffer.layout.slots:
        gaps += data[slot.offset + slot.num_bytes : slot.end]
    return gaps


class TestLayout:
    @given(TENSORS)
    def test_every_tensor_has_an_aligned_place_of_its_own(
        self, tensors: list[tuple[str, tuple[int, ...], str]]
    ) -> None:
        layout = FlatLayout(tensors)
        buffer = FlatBuffer(layout, CPU)

        position = 0
        for slot, (name, shape, dtype) in zip(layout.slots, tensors, strict=True):
            view = buffer.views[name]
            assert slot == layout.slot(name)
            assert slot.offset == position == aligned(position)
            assert (view.shape, view.dtype) == (shape, getattr(torch, dtype))
            assert view.is_contiguous()
            assert slot.num_bytes == view.numel() * view.element_size()
            assert not view.numel() or view.data_ptr() % ALIGNMENT_BYTES == 0
            position = slot.end
        assert layout.num_bytes == position == len(buffer.memory())

    @given(TENSORS)
    def test_regions_are_the_runs_of_one_dtype_and_cover_everything(
        self, tensors: list[tuple[str, tuple[int, ...], str]]
    ) -> None:
        layout = FlatLayout(tensors)

        assert sum(end - first for _, first, end in layout.regions) == layout.num_bytes
        for (one, _, end), (other, first, _) in zip(layout.regions, layout.regions[1:], strict=False):
            assert one != other and end == first

    @pytest.mark.parametrize(("size", "rounded"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128)])
    def test_alignment(self, size: int, rounded: int) -> None:
        assert aligned(size) == rounded


class TestArithmetic:
    @given(TENSORS, st.integers(0, 99))
    def test_it_is_that_of_the_tensors_and_leaves_the_gaps_zero(
        self, tensors: list[tuple[str, tuple[int, ...], str]], seed: int
    ) -> None:
        layout = FlatLayout(tensors)
        a, b = fill(FlatBuffer(layout, CPU), seed), fill(FlatBuffer(layout, CPU), seed + 100)
        total = FlatBuffer(layout, CPU).set_sum_(a, b)
        doubled = FlatBuffer(layout, CPU).copy_(a).mul_(2.0)

        for name in a.views:
            assert torch.equal(total.views[name], a.views[name] + b.views[name])
            factor = 2 if a.views[name].is_floating_point() else 1
            assert torch.equal(doubled.views[name], a.views[name] * factor)
        a.add_(b)
        for name in a.views:
            assert torch.equal(a.views[name], total.views[name])
        assert not any(gap_bytes(a) + gap_bytes(total) + gap_bytes(doubled))
        assert not any(a.zero_().memory())

    def test_a_sum_is_rounded_once_per_element(self) -> None:
        layout = FlatLayout([("w", (1000,), "float32")])
        a, b = FlatBuffer(layout, CPU), FlatBuffer(layout, CPU)
        a.views["w"].copy_(torch.randn(1000, generator=torch.Generator().manual_seed(1)))
        b.views["w"].copy_(torch.randn(1000, generator=torch.Generator().manual_seed(2)))

        assert torch.equal(FlatBuffer(layout, CPU).set_sum_(a, b).views["w"], a.views["w"] + b.views["w"])

    def test_memory_shares_the_bytes(self) -> None:
        buffer = FlatBuffer(FlatLayout([("w", (4,), "float32")]), CPU)
        buffer.memory()[0:4] = b"\x00\x00\x80\x3f"

        assert buffer.views["w"].tolist() == [1.0, 0.0, 0.0, 0.0]


class TestFinite:
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    def test_one_bad_element_is_found_wherever_it_is(self, dtype: str, value: float) -> None:
        layout = FlatLayout([("first", (3,), dtype), ("n", (2,), "int64"), ("last", (5, 7), dtype)])
        for name in ("first", "last"):
            for position in range(layout.slot(name).num_bytes // DTYPE_BYTES[dtype]):
                buffer = FlatBuffer(layout, CPU)
                buffer.views[name].view(-1)[position] = value
                assert not buffer.is_finite()
                assert buffer.first_non_finite() == name

    @given(st.sampled_from(FLOATS), st.integers(1, 300), st.data())
    @settings(max_examples=60)
    def test_any_length(self, dtype: str, length: int, data: st.DataObject) -> None:
        tensor = torch.ones(length, dtype=getattr(torch, dtype))
        tensor[data.draw(st.integers(0, length - 1))] = torch.finfo(tensor.dtype).max
        assert finite(tensor)
        tensor[data.draw(st.integers(0, length - 1))] = float("-inf")
        tensor[data.draw(st.integers(0, length - 1))] = data.draw(st.sampled_from([float("nan"), float("inf")]))
        assert not finite(tensor)

    @pytest.mark.parametrize("threads", [1, 2])
    def test_finite_elements_whose_sum_overflows_are_finite(self, threads: int) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert finite(torch.full((100,), torch.finfo(torch.float32).max))
            assert not finite(torch.tensor([float("inf"), float("-inf"), 1.0]))
        finally:
            torch.set_num_threads(before)

    def test_what_is_finite_is_gone_through_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def second_pass(_: torch.Tensor) -> None:
            raise AssertionError

        monkeypatch.setattr(torch, "aminmax", second_pass)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        assert finite(torch.ones(1000))

    def test_integers_and_nothing_are_finite(self) -> None:
        assert finite(torch.full((3,), 2**62))
        assert finite(torch.empty(0))
        buffer = FlatBuffer(FlatLayout([]), CPU)
        assert buffer.is_finite()
        assert buffer.first_non_finite() is None

    def test_the_first_of_several_is_named(self) -> None:
        buffer = FlatBuffer(FlatLayout([(name, (2,), "float32") for name in "abc"]), CPU)
        buffer.views["c"][0] = float("nan")
        buffer.views["b"][1] = float("inf")

        assert buffer.first_non_finite() == "b"


class TestPool:
    def test_the_last_holder_hands_the_buffer_back(self) -> None:
        pool = BufferPool(FlatLayout([("w", (4,), "float32")]), CPU)
        buffer = pool.take()
        pool.hold(buffer)
        pool.release(buffer)
        assert (pool.alive, buffer.references) == (1, 1)
        assert pool.take() is not buffer

        pool.release(buffer)

        assert (pool.alive, pool.peak) == (1, 2)
        again = pool.take()
        assert again is buffer
        assert again.references == 1

    def test_one_release_too_many(self) -> None:
        pool = BufferPool(FlatLayout([("w", (4,), "float32")]), CPU)
        buffer = pool.take()
        pool.release(buffer)

        with pytest.raises(AssertionError, match="released more often than held"):
            pool.release(buffer)

    def test_what_nobody_holds_cannot_be_held(self) -> None:
        pool = BufferPool(FlatLayout([("w", (4,), "float32")]), CPU)
        buffer = pool.take()
        pool.release(buffer)

        with pytest.raises(AssertionError, match="without a holder"):
            pool.hold(buffer)

    def test_on_the_cpu_host_memory_is_counted_apart_but_nothing_is_copied(self) -> None:
        pool = BufferPool(FlatLayout([("w", (4,), "float32")]), CPU)
        buffer = pool.take()

        assert pool.to_host(buffer) is pool.to_host(buffer) is buffer
        assert (pool.alive, pool.peak, pool.host_alive, pool.host_peak) == (0, 1, 1, 1)
        assert pool.to_device(buffer) is buffer
        assert (pool.alive, pool.peak, pool.host_alive, pool.host_peak) == (1, 1, 0, 1)

        pool.release(pool.to_host(buffer))
        assert (pool.alive, pool.host_alive) == (0, 0)
        assert pool.take() is buffer, "both places take from the same buffers"
        assert not buffer.on_host

    def test_what_has_several_holders_does_not_move(self) -> None:
        pool = BufferPool(FlatLayout([("w", (4,), "float32")]), CPU)
        buffer = pool.hold(pool.take())

        with pytest.raises(AssertionError, match="sole holder"):
            pool.to_host(buffer)

    @given(st.lists(st.integers(0, 3), max_size=40))
    def test_it_never_makes_more_than_were_alive_at_once(self, choices: list[int]) -> None:
        pool = BufferPool(FlatLayout([("w", (4,), "float32")]), CPU)
        held: list[FlatBuffer] = []
        made: set[int] = set()
        peak = 0
        for choice in choices:
            if choice == 0 and held:
                pool.release(held.pop())
            else:
                held.append(pool.take())
                assert len({id(buffer) for buffer in held}) == len(held)
            peak = max(peak, len(held))
            made |= {id(buffer) for buffer in held}
            assert (pool.alive, pool.peak) == (len(held), peak)
        assert len(made) <= peak


@pytest.mark.parametrize("bad", [None, 0, 32_767, 32_768, 100_000, 262_143, 262_150])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_finite_check_stays_on_the_calling_thread(
    monkeypatch: pytest.MonkeyPatch, bad: int | None, dtype: torch.dtype
) -> None:
    """Threads of torch that wait for each other on busy cores cost a shard more than the whole push."""
    sizes: list[int] = []
    aminmax = torch.aminmax

    def counted(part: torch.Tensor) -> object:
        sizes.append(part.numel())
        return aminmax(part)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "aminmax", counted)
    tensor = torch.ones((1 << 18) + 7, dtype=dtype)
    if bad is not None:
        tensor[bad] = float("nan") if bad % 2 else float("-inf")

    assert finite(tensor) == (bad is None)
    assert sum(sizes) == (tensor.numel() if dtype == torch.bfloat16 else 0), "NumPy has no threads"
    assert max(sizes, default=0) <= 32_768
