"""Witness weights (`wsp.md` §8): integer updates whose sum tells exactly which of them were added, and how often.

A cell is one element of a tensor, seen as a row of digits of `DIGIT_BITS` bits. Whatever shall be counted owns a digit
and adds 1 to it; sums stay exact as long as a cell fits the mantissa, so the final weights are the counts.

`Witness` is for pushing synthetic updates straight to shards: every (virtual worker, wave, slice) owns a digit.
`witness_model`, `WitnessDataset` and `witness_loss` are for whole runs with SGD at lr = 1 and `combine: sum`: every
sample owns a digit in every layer, whatever weights its minibatch used. `sample_counts` reads them back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor, nn

#: Bits per digit: counts 0 to 3 are told apart, and a carry out of a digit shows up as a wrong count of its neighbour.
DIGIT_BITS = 2

#: Integers that a dtype holds exactly, in bits.
MANTISSA_BITS = {torch.float32: 24, torch.float64: 53}


def digits_per_cell(dtype: torch.dtype) -> int:
    """How many digits one element of `dtype` has room for."""
    return MANTISSA_BITS[dtype] // DIGIT_BITS


def num_cells(num_digits: int, dtype: torch.dtype) -> int:
    """How many elements of `dtype` hold `num_digits` digits."""
    return -(-num_digits // digits_per_cell(dtype))


def encode(digit: int, *, num_digits: int, dtype: torch.dtype) -> Tensor:
    """The cells that add 1 to digit number `digit`."""
    per_cell = digits_per_cell(dtype)
    cells = torch.zeros(num_cells(num_digits, dtype), dtype=dtype)
    cells[digit // per_cell] = float(1 << DIGIT_BITS * (digit % per_cell))
    return cells


def decode(cells: Tensor, *, num_digits: int) -> list[int]:
    """The count in every digit of `cells`.

    Raises:
        ValueError: a cell is no sum of witness updates.
    """
    per_cell = digits_per_cell(cells.dtype)
    digits: list[int] = []
    for position, value in enumerate(cells.tolist()):
        if not value.is_integer() or not 0 <= value < 1 << per_cell * DIGIT_BITS:
            raise ValueError(f"cell {position} is {value}, which no sum of witness updates gives")
        digits += [int(value) >> DIGIT_BITS * i & (1 << DIGIT_BITS) - 1 for i in range(per_cell)]
    if any(digits[num_digits:]):
        raise ValueError(f"digits above {num_digits} are set: {digits[num_digits:]}")
    return digits[:num_digits]


class FaultKind(Enum):
    """What can be wrong with one wave of one virtual worker."""

    LOST = "lost"
    """Added nowhere."""
    DOUBLED = "doubled"
    """Added everywhere, equally often, but more than once."""
    TORN = "torn"
    """Added in some places more often than in others."""
    MISPLACED = "misplaced"
    """Added to a slice it was not made for."""
    UNEXPECTED = "unexpected"
    """Added although it was never committed."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A wave that was not added exactly once."""

    kind: FaultKind
    vw: int
    wave: int
    counts: tuple[int, ...]
    """How often it was found, per place: (slice, copy) in order; for MISPLACED in the one slice where it was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """A layout of digits over (virtual worker, wave, slice); every slice has room for the digits of all slices."""

    num_vws: int
    num_waves: int
    num_slices: int = 1
    copies: int = 1
    """How often the cells are repeated in a slice, so that a slice may span several chunks: a torn one shows."""
    dtype: torch.dtype = torch.float32

    @property
    def num_digits(self) -> int:
        """Digits in all."""
        return self.num_vws * self.num_waves * self.num_slices

    @property
    def slice_elements(self) -> int:
        """Elements of every slice."""
        return num_cells(self.num_digits, self.dtype) * self.copies

    def update(self, vw: int, wave: int, slice_index: int = 0) -> Tensor:
        """ũ of `vw` in `wave` for one slice."""
        cells = encode(self._digit(vw, wave, slice_index), num_digits=self.num_digits, dtype=self.dtype)
        return cells.repeat(self.copies)

    def counts(self, slices: Sequence[Tensor]) -> dict[tuple[int, int], tuple[int, ...]]:
        """How often each (virtual worker, wave) was added, per place: slice by slice, copy by copy.

        Args:
            slices: the final weights of every slice, which began as zeros.
        """
        places = self._places(slices)
        return {
            (vw, wave): tuple(digits[self._digit(vw, wave, index)] for index, digits in places)
            for wave in range(self.num_waves)
            for vw in range(self.num_vws)
        }

    def faults(self, slices: Sequence[Tensor], committed: Mapping[int, int] | None = None) -> list[Fault]:
        """Every wave below `committed` (virtual worker → waves; default: all) must be there once, others not at all."""
        found: list[Fault] = []
        for (vw, wave), counts in self.counts(slices).items():
            expected = int(wave < (self.num_waves if committed is None else committed[vw]))
            if set(counts) != {expected}:
                found.append(Fault(_kind(counts, expected), vw, wave, counts))
        foreign: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        for index, digits in self._places(slices):
            for other in set(range(self.num_slices)) - {index}:
                for vw in range(self.num_vws):
                    for wave in range(self.num_waves):
                        foreign[index, vw, wave].append(digits[self._digit(vw, wave, other)])
        found += [
            Fault(FaultKind.MISPLACED, vw, wave, tuple(counts))
            for (_, vw, wave), counts in foreign.items()
            if any(counts)
        ]
        return found

    def _digit(self, vw: int, wave: int, slice_index: int) -> int:
        return (slice_index * self.num_waves + wave) * self.num_vws + vw

    def _places(self, slices: Sequence[Tensor]) -> list[tuple[int, list[int]]]:
        """(slice, digits) per place."""
        return [
            (index, decode(copy, num_digits=self.num_digits))
            for index, weights in enumerate(slices)
            for copy in weights.reshape(self.copies, -1)
        ]


def _kind(counts: Sequence[int], expected: int) -> FaultKind:
    if not expected:
        return FaultKind.UNEXPECTED
    if len(set(counts)) > 1:
        return FaultKind.TORN
    return FaultKind.DOUBLED if counts[0] else FaultKind.LOST


class WitnessLayer(nn.Module):
    """Passes its input on and adds its own product with it, so that d(total)/d(cells) is the sum of the inputs."""

    def __init__(self, cells: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.cells = nn.Parameter(torch.zeros(cells, dtype=dtype))

    def forward(self, samples: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """(samples [batch, cells], total [batch]) → the same."""
        return samples, total + samples @ self.cells


def witness_model(num_layers: int, num_samples: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A chain of layers, each of which counts samples in its one parameter, `INDEX.cells`."""
    return nn.Sequential(*(WitnessLayer(num_cells(num_samples, dtype), dtype) for _ in range(num_layers)))


@dataclass(frozen=True, slots=True)
class WitnessDataset:
    """Sample i is ((its digit as cells, 0), 0)."""

    num_samples: int
    dtype: torch.dtype = torch.float32

    def __len__(self) -> int:
        """The number of samples."""
        return self.num_samples

    def __getitem__(self, index: int, /) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """Sample `index`."""
        zero = torch.zeros((), dtype=self.dtype)
        return (encode(index, num_digits=self.num_samples, dtype=self.dtype), zero), zero


def witness_loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Minus the sum of the totals; a sum and not a mean, so that the gradient is made of integers."""
    return (target - output[1]).sum()


def sample_counts(cells: Tensor, num_samples: int) -> list[int]:
    """How often each sample was used, from the final `cells` of one layer."""
    return decode(cells, num_digits=num_samples)
