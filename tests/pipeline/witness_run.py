"""The witness of a whole run: do its final weights hold each committed wave exactly once, whoever died?

The job. Its model is a chain of `tests.pipeline.witness.WitnessLayer`s, trained with SGD at lr = 1, `combine: sum` and
the policy `wave`, for instance by `tests.chaos.witness_job` or `tests.models.witnesses`. The gradient of a minibatch is
the sum of its samples, each of which owns a digit of its own in every layer, whatever the weights were. So an update is
a function of the samples alone, which are dealt anew when somebody dies, and sums are exact in any order, in float32 as
in float64, up to three epochs. How many waves a virtual worker makes need not be known beforehand.

The judgement. What the weights must hold is derived from the decision log's lines in the history: `used` says which
samples a committed wave counted, a resumed run's `facts.json` says what its initial weights held already, and what a
rewind to an older checkpoint undid does not count. `judge` compares each digit of each layer with that. Every sample of
an epoch belongs to one committed wave, so missing digits name waves that were lost, or torn if not all of their digits
are missing; digits too many name waves that were added twice, or else updates that no commit stands for. Where several
faults meet, the fewest waves that explain all of them are named; that there is a fault is certain in any case.

    python -m tests.pipeline.witness_run RUN_DIR
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import load_file

from hetpipe.checker.events import Commit, Publish, Used
from hetpipe.checker.reading import read_history
from hetpipe.checkpoint.export import export_weights
from hetpipe.errors import HetpipeError
from tests.pipeline.witness import DIGIT_BITS, FaultKind, sample_counts

#: What a digit can hold.
MAX_COUNT = (1 << DIGIT_BITS) - 1

#: How many faults are told one by one.
_MANY = 20


@dataclass(frozen=True, slots=True)
class WaveKey:
    """A wave as the history names it."""

    vw: int
    wave: int

    def __str__(self) -> str:
        """For sentences."""
        return f"wave {self.wave} of virtual worker {self.vw}"


@dataclass(frozen=True, slots=True)
class Found:
    """A wave, or with `wave` None an update that no commit stands for, that the weights do not hold exactly once."""

    kind: FaultKind
    wave: WaveKey | None
    samples: tuple[int, ...]
    layers: Mapping[str, int]
    """How many digits are wrong, by layer; negative where they are too low."""

    def __str__(self) -> str:
        """One sentence."""
        what = "an update that no commit stands for" if self.wave is None else str(self.wave)
        digits = ", ".join(
            f"{abs(wrong)} of {len(self.samples)} digits of {name} too {'low' if wrong < 0 else 'high'}"
            for name, wrong in self.layers.items()
        )
        return f"{what} was {self.kind.value}: {digits} (samples {', '.join(map(str, self.samples[:5]))}, …)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the final weights prove."""

    clock: int
    """Of the weights."""
    waves: int
    """Committed ones that they must hold, empty ones not counted."""
    samples: int
    """That those used."""
    problems: tuple[str, ...] = ()
    """Why they prove nothing: the ledger or the weights are not those of a witness job."""
    faults: tuple[Found, ...] = ()

    @property
    def ok(self) -> bool:
        """Each wave once, everywhere."""
        return not self.problems and not self.faults

    def sentences(self) -> list[str]:
        """For people; the last one is the sum."""
        told = [*self.problems, *map(str, self.faults[:_MANY])]
        if len(self.faults) > _MANY:
            told.append(f"and {len(self.faults) - _MANY} more")
        kinds = [fault.kind for fault in self.faults]
        counts = ", ".join(f"{kinds.count(kind)} {kind.value}" for kind in FaultKind if kind is not FaultKind.MISPLACED)
        return [*told, f"clock {self.clock}: {self.waves} waves of {self.samples} samples in the weights; {counts}"]


@dataclass(slots=True)
class Ledger:
    """What was committed, by the history."""

    waves: dict[WaveKey, tuple[int, ...]] = field(default_factory=dict)
    """Samples of each wave, empty ones left out."""
    problems: list[str] = field(default_factory=list)


def read_ledger(run_dir: Path, *, below: int) -> Ledger:
    """The committed waves below a clock.

    Raises:
        UserError: there is no history.
    """
    events = [event for event in read_history(run_dir).events if isinstance(event, Commit | Publish | Used)]
    ledger = Ledger()
    for term in sorted({event.origin.term for event in events}):
        lines = [event for event in events if event.origin.term == term]
        start = min((line.clock for line in lines if isinstance(line, Publish)), default=below)
        # What lies at or above the clock that a term starts from was undone by it.
        ledger.waves = {key: samples for key, samples in ledger.waves.items() if key.wave < start}
        _add_term(ledger, lines, below)
    return ledger


def _add_term(ledger: Ledger, lines: Sequence[Commit | Publish | Used], below: int) -> None:
    used = _by_wave(ledger, [line for line in lines if isinstance(line, Used) and line.wave < below], "used")
    commits = _by_wave(ledger, [line for line in lines if isinstance(line, Commit) and line.wave < below], "committed")
    for key, commit in commits.items():
        indices = used[key].indices if key in used else ()
        if commit.samples != len(indices):
            told = f"{commit.samples} samples, and its line `used` {len(indices)}"
            ledger.problems.append(f"the commit of {key} says {told}")
        if indices:
            ledger.waves[key] = indices
    for key in used.keys() - commits.keys():
        ledger.problems.append(f"the samples of {key} are used, and it was never committed")


def _by_wave(ledger: Ledger, lines: Iterable[Any], deed: str) -> dict[WaveKey, Any]:
    found: dict[WaveKey, Any] = {}
    for line in lines:
        key = WaveKey(line.vw, line.wave)
        if key in found or key in ledger.waves:
            ledger.problems.append(f"{key} is {deed} twice")
        found[key] = line
    return found


def judge(run_dir: Path) -> Judgement:
    """Compare the final weights of a run with its history.

    Raises:
        HetpipeError: there is no complete checkpoint, or no history.
        OSError, ValueError: `facts.json` is missing or damaged.
    """
    facts = json.loads((run_dir / "facts.json").read_text())
    clock, cells = _final_weights(run_dir)
    ledger = read_ledger(run_dir, below=clock)
    before = [facts["start"]["epoch"] + (index in set(facts["start"]["used"])) for index in range(facts["num_samples"])]
    expected = list(before)
    for samples in ledger.waves.values():
        for sample in samples:
            expected[sample] += 1
    problems = [*ledger.problems]
    if max(expected, default=0) > MAX_COUNT:
        problems.append(f"a sample counts {max(expected)} times, and a digit holds no more than {MAX_COUNT}")
    wrong: dict[str, list[int]] = {}
    for name, layer in sorted(cells.items()):
        try:
            wrong[name] = [a - b for a, b in zip(sample_counts(layer, len(expected)), expected, strict=True)]
        except ValueError as error:
            problems.append(f"{name}: {error}")
    return Judgement(
        clock=clock,
        waves=len(ledger.waves),
        samples=sum(map(len, ledger.waves.values())),
        problems=tuple(problems),
        faults=tuple(explain(wrong, ledger.waves)),
    )


def _final_weights(run_dir: Path) -> tuple[int, dict[str, Any]]:
    """Clock and layers of the newest complete checkpoint, as users get them."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "weights.safetensors"
        exported = export_weights(run_dir, out)
        return exported.clock, load_file(out)


def explain(wrong: Mapping[str, Sequence[int]], waves: Mapping[WaveKey, tuple[int, ...]]) -> list[Found]:
    """The fewest faults that make the counts of each layer as wrong as they are.

    Args:
        wrong: how much too high the count of each sample is, by layer.
        waves: samples of each committed wave.
    """
    rest = {name: list(counts) for name, counts in wrong.items()}
    found = [*_explain_missing(rest, waves), *_explain_surplus(rest, waves)]
    while surplus := _off(rest, range(max(map(len, rest.values()), default=0)), _is_surplus):
        samples = tuple(sorted({sample for _, sample in surplus}))
        found.append(_found(FaultKind.UNEXPECTED, None, samples, surplus, 1))
        _correct(rest, surplus, -1)
    return found


_Off = list[tuple[str, int]]
"""Digits: (layer, sample)."""


def _explain_missing(rest: dict[str, list[int]], waves: Mapping[WaveKey, tuple[int, ...]]) -> Iterable[Found]:
    """Waves that were lost or torn, those first of which the largest part is missing."""
    while True:
        shares = {
            key: len(_off(rest, samples, _is_missing)) / (len(samples) * len(rest)) for key, samples in waves.items()
        }
        key = max(shares, key=lambda key: (shares[key], len(waves[key])), default=None)
        if key is None or not shares[key]:
            return
        off = _off(rest, waves[key], _is_missing)
        yield _found(FaultKind.LOST if shares[key] == 1.0 else FaultKind.TORN, key, waves[key], off, -1)
        _correct(rest, off, 1)


def _explain_surplus(rest: dict[str, list[int]], waves: Mapping[WaveKey, tuple[int, ...]]) -> Iterable[Found]:
    """Waves that were added twice, all of them or in whole layers."""
    for key, samples in waves.items():
        while off := _whole_layers(_off(rest, samples, _is_surplus), len(samples)):
            is_everywhere = len(off) == len(samples) * len(rest)
            yield _found(FaultKind.DOUBLED if is_everywhere else FaultKind.TORN, key, samples, off, 1)
            _correct(rest, off, -1)


def _whole_layers(off: _Off, num_samples: int) -> _Off:
    names = [name for name, _ in off]
    return [(name, sample) for name, sample in off if names.count(name) == num_samples]


def _is_missing(count: int) -> bool:
    return count < 0


def _is_surplus(count: int) -> bool:
    return count > 0


def _off(rest: Mapping[str, Sequence[int]], samples: Iterable[int], is_off: Callable[[int], bool]) -> _Off:
    wanted = tuple(samples)
    return [(name, sample) for name, counts in rest.items() for sample in wanted if is_off(counts[sample])]


def _correct(rest: dict[str, list[int]], off: _Off, by: int) -> None:
    for name, sample in off:
        rest[name][sample] += by


def _found(kind: FaultKind, key: WaveKey | None, samples: tuple[int, ...], off: _Off, sign: int) -> Found:
    names = [name for name, _ in off]
    return Found(kind, key, samples, {name: sign * names.count(name) for name in dict.fromkeys(names)})


def main(arguments: Sequence[str]) -> int:
    """Print what the weights of a run prove; the exit status."""
    try:
        (run_dir,) = arguments
        judgement = judge(Path(run_dir))
    except (HetpipeError, OSError, ValueError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("".join(f"{sentence}\n" for sentence in judgement.sentences()))
    return 0 if judgement.ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
