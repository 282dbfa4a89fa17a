"""Verify the sample ledger: every sample of an epoch counts exactly once, despite failures (`wsp.md` §5)."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter

from hetpipe.checker.events import Used
from hetpipe.checker.facts import Facts
from hetpipe.checker.formulas import minibatches_in, shares
from hetpipe.checker.report import Findings, Kind
from hetpipe.checker.timeline import Timeline

#: Maximum number of samples named in a message.
_NAMED = 5


class SampleVerifier:
    """Verifies `used` lines, in any order."""

    def __init__(self, facts: Facts, timeline: Timeline, findings: Findings) -> None:
        self._data = facts.data
        self._start = facts.start
        self._num_workers = len(facts.layout.bounds) - facts.layout.num_added
        self._timeline = timeline
        self._findings = findings
        #: Epoch → sample → the line that used it first; None for samples used before the run started.
        self._epochs: dict[int, dict[int, Used | None]] = {self._start.epoch: dict.fromkeys(self._start.used)}
        self._counted: Counter[tuple[int, int]] = Counter()
        self._lines: dict[tuple[int, int], Used] = {}

    def see(self, used: Used) -> None:
        """Add one wave's samples to the ledger."""
        self._lines.setdefault((used.vw, used.wave), used)
        self._counted[used.vw, used.wave] += len(used.indices)
        epoch = self._start.epoch + self._timeline.epochs_ended(used.wave)
        if used.epoch != epoch and used.indices:
            message = f"{_name(used)} uses samples of epoch {used.epoch + 1}, but epoch {epoch + 1} is under way"
            self._findings.add(Kind.SAMPLE_UNKNOWN, message, used.origin)
        ledger = self._epochs.setdefault(used.epoch, {})
        twice = [index for index in used.indices if index in ledger]
        beyond = [index for index in used.indices if not 0 <= index < self._data.num_samples]
        repeated = [index for index, count in Counter(used.indices).items() if count > 1] if used.indices else []
        for index in used.indices:
            ledger.setdefault(index, used)
        if beyond:
            message = f"{_name(used)} uses samples {beyond[:_NAMED]} of data with {self._data.num_samples} samples"
            self._findings.add(Kind.SAMPLE_UNKNOWN, message, used.origin)
        if twice or repeated:
            self._report_twice(used, twice, repeated)

    def _report_twice(self, used: Used, twice: list[int], repeated: list[int]) -> None:
        message = f"{_name(used)} uses {len(twice) + len(repeated)} samples again in epoch {used.epoch + 1}"
        if twice:
            first = self._epochs[used.epoch][twice[0]]
            message += f"; sample {twice[0]} was used by {_name(first) if first else 'a wave before the run started'}"
        else:
            message += f"; sample {repeated[0]} is there more than once"
        self._findings.add(Kind.SAMPLE_TWICE, message, used.origin)

    def finish(self) -> None:
        """Verify commits against the ledger, ended epochs, and the end of the run."""
        self._verify_commits()
        for (vw, wave), used in self._lines.items():
            line = self._timeline
            lost = line.may_have_lost_commit(vw, line.members.get(vw, -1), wave)
            if (vw, wave) not in line.commits and not lost:
                message = f"{_name(used)} uses {len(used.indices)} samples, but was never committed"
                self._findings.add(Kind.SAMPLE_UNCOMMITTED, message, used.origin)
        for number, barrier in enumerate(self._timeline.epoch_ends):
            epoch = self._start.epoch + number
            ledger = self._epochs.get(epoch, {})
            missing = [index for index in range(self._data.num_samples) if index not in ledger]
            if missing:
                message = (
                    f"epoch {epoch + 1} ends at clock {barrier.clock}, but {len(missing)} of {self._data.num_samples} "
                    f"samples were never used, the first {missing[:_NAMED]}"
                )
                self._findings.add(Kind.SAMPLE_NEVER, message, barrier.origin)
        self._verify_shares()
        self._verify_total()

    def _verify_shares(self) -> None:
        """Verify the split of minibatches between two barriers by N_v, where no member was evicted."""
        line = self._timeline
        if not line.rules:
            return
        ends = dict(zip(line.barriers, line.barriers[1:], strict=False))
        done: dict[int, Counter[int]] = {start: Counter() for start in ends}
        for (vw, wave), commit in line.commits.items():
            start = line.barriers[bisect_right(line.barriers, wave) - 1]
            if start in ends:
                done[start][vw] += minibatches_in(commit.samples, self._data.batch_size)
        evicted = [life.eviction.clock for life in line.lives.values() if life.eviction is not None]
        for start, end in ends.items():
            if any(start <= clock < end for clock in evicted):
                continue  # its uncommitted minibatches were dealt again
            per_wave = {vw: line.rule_in(vw, start).minibatches_per_wave for vw in sorted(done[start])}
            due = shares(per_wave, done[start].total())
            for vw, share in due.items():
                if done[start][vw] != share:
                    message = (
                        f"virtual worker {vw} computes {done[start][vw]} of the {done[start].total()} minibatches "
                        f"between clocks {start} and {end}; its share is {share}"
                    )
                    self._findings.add(Kind.WAVE_SHARE, message, line.publishes[end].origin)

    def _verify_commits(self) -> None:
        line = self._timeline
        for (vw, wave), commit in line.commits.items():
            counted = self._counted[vw, wave]
            # A run cut short may lack the line that goes with the very last commit.
            excused = not line.complete and (vw, wave) not in self._lines and line.local[vw] == wave + 1
            if counted != commit.samples and not excused:
                message = (
                    f"commit of wave {wave} by virtual worker {vw} counts {commit.samples} samples, "
                    f"but {counted} are entered as used"
                )
                self._findings.add(Kind.SAMPLE_COUNT, message, commit.origin)

    def _verify_total(self) -> None:
        end = self._timeline.end
        if end is None or "end" not in end.words or "stop" in end.words:
            return
        if self._data.epochs is not None:
            ended = self._start.epoch + len(self._timeline.epoch_ends)
            if ended != self._data.epochs:
                message = f"the run ended at clock {end.clock} after {ended} of {self._data.epochs} epochs"
                self._findings.add(Kind.WRONG_TOTAL, message, end.origin)
        elif self._data.minibatches is not None and self._start.clock == 0:
            # A resumed run may have another number of virtual workers than the one that the total was counted from.
            commits = self._timeline.commits.values()
            done = sum(minibatches_in(commit.samples, self._data.batch_size) for commit in commits)
            total = self._data.minibatches * self._num_workers
            if done != total:
                message = f"the run ended at clock {end.clock} after {done} of {total} minibatches"
                self._findings.add(Kind.WRONG_TOTAL, message, end.origin)


def _name(used: Used) -> str:
    return f"wave {used.wave} of virtual worker {used.vw}"
