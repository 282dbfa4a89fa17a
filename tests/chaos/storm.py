"""`python -m tests.chaos.storm`: random faults for half an hour, one every half minute, while job follows job.

    python -m tests.chaos.storm --minutes 5 --seed 3            shorter, in another order
    python -m tests.chaos.storm --only 'kill/*' --faults 10     some kinds, so many faults
    python -m tests.chaos.storm --without '*/redis'             all but some
    python -m tests.chaos.storm --list                          which faults, in which order; nothing is done

Redis, a coordinator, two parameter servers and three agents run under mutual TLS, each started again whenever it ends.
`hetpipe submit` hands in one witness job after the other and follows it; it is among the victims. A fault is survived
if by itself, within `RECOVER_SECONDS`, everybody is back, the clock moves on and there is a new checkpoint, or the job
has come to its end. Exit status 1 unless all were survived, and every job held every sample of every epoch once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.errors import HetpipeError
from tests.chaos import witness_job
from tests.chaos.cells import Deed
from tests.chaos.cluster import COORDINATOR, LEASE_SECONDS, REDIS, RUNS, Cluster, Layout
from tests.chaos.disks import MountMeans, in_namespace
from tests.chaos.keeper import Kept, state_of
from tests.chaos.outcome import Outcome, Tally
from tests.chaos.sequence import STALL_SECONDS, SURVIVE, Say
from tests.chaos.storm_faults import BEYOND, FOLLOWER, SHARDS, Selection, StormFault, Strike, schedule
from tests.chaos.storm_job import Position, StormJob
from tests.chaos.storm_report import FAULTS_PER_MINUTE, Entry, StormReport
from tests.chaos.trial import MOVES_WAVES
from tests.polling import wait_until

#: From the beginning of one fault to that of the next, if the job has got over it by then.
EVERY_SECONDS = 22.0

#: The least time between a recovery and the next fault.
CALM_SECONDS = 2.0

#: Longest way back to a whole cluster whose clock moves; also of the next job under way.
RECOVER_SECONDS = 120.0

#: How long a disk stays full.
FULL_SECONDS = 6.0

#: How long whoever was told to end (SIGTERM) may take for it.
_TERM_SECONDS = 40.0

#: Between two looks at cluster and job.
_LOOK_SECONDS = 0.1

#: A pause is longer than the lease by so much.
_MARGIN_SECONDS = 1.0

#: Samples of a job: three passes over them take three minutes without a fault.
SAMPLES = 3_000

#: Sizes of the disks.
DISK_BYTES = {**dict.fromkeys((*SHARDS, REDIS), 32 << 20), RUNS: 512 << 20}

#: One virtual worker is within a node, the other one has a stage on each of two nodes.
DEVICES = (2, 1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StormOptions:
    """What the command line says."""

    seconds: float
    seed: int
    every_seconds: float = EVERY_SECONDS
    num_faults: int | None = None
    """So many, however long it takes; None: as many as the time has room for, at least `FAULTS_PER_MINUTE`."""
    selection: Selection = field(default_factory=Selection)

    def is_over(self, *, elapsed: float, num_faults: int) -> bool:
        """Whether no further fault is to come."""
        if self.num_faults is not None:
            return num_faults >= self.num_faults
        return elapsed >= self.seconds and num_faults >= self.seconds / 60.0 * FAULTS_PER_MINUTE


class Striker:
    """Strikes one cluster and its job."""

    def __init__(self, cluster: Cluster, job: StormJob) -> None:
        self._cluster = cluster
        self._job = job

    def strike(self, fault: StormFault) -> None:
        """Do all of it; returns when whoever was struck may come back, and disks have room again."""
        stages = self._job.stage_pids()
        with ExitStack() as stack:
            holds = []
            for number, strike in enumerate(fault.strikes):
                if number and fault.gap_seconds:
                    SYSTEM_CLOCK.sleep(fault.gap_seconds)
                holds.append(stack.enter_context(self._struck(strike, stages)))
            SYSTEM_CLOCK.sleep(max(holds))

    @contextmanager
    def _struck(self, strike: Strike, stages: Mapping[str, int]) -> Iterator[float]:
        """The fault is there in the block; how long it is to last."""
        victim = strike.victim
        match strike.deed:
            case Deed.KILL:
                self._signal(victim, stages, signal.SIGKILL)
                yield 0.0
            case Deed.RESTART:
                with self._ended(self._kept(victim)):
                    self._signal(victim, stages, signal.SIGTERM)
                    yield 0.0
            case Deed.PAUSE:
                pid = self._signal(victim, stages, signal.SIGSTOP)
                try:
                    # Its agent ends a stage that says nothing for so long; the others lose their lease.
                    yield (STALL_SECONDS if victim in stages else LEASE_SECONDS) + _MARGIN_SECONDS
                finally:
                    _send(pid, signal.SIGCONT)
            case Deed.WIPE | Deed.LOSE_DISK:
                with self._cluster.killed_without_data(victim, [victim]):
                    yield 0.0
            case Deed.FLUSH:
                self._cluster.flush_redis()
                yield 0.0
            case Deed.FILL_DISK:
                with self._cluster.disks[victim].full():
                    yield FULL_SECONDS

    def _signal(self, victim: str, stages: Mapping[str, int], number: signal.Signals) -> int:
        """The process that got the signal."""
        if victim.startswith("stage-"):
            pid = stages.get(victim, 0)
        else:
            life = self._kept(victim).life
            life.expected = True
            pid = life.pid if life.code is None else 0
        _send(pid, number)
        return pid

    @contextmanager
    def _ended(self, kept: Kept) -> Iterator[None]:
        """Whoever lives at the beginning of the block is gone at its end."""
        life = kept.life
        yield
        try:
            wait_until(lambda: life.code is not None, timeout_seconds=_TERM_SECONDS, what=f"end of {kept.spec.key}")
        except AssertionError:
            _send(life.pid, signal.SIGKILL)
            raise

    def _kept(self, victim: str) -> Kept:
        return self._job.follower if victim == FOLLOWER else self._cluster.kept[victim]


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        if pid > 0 and state_of(pid) not in {"", "Z"}:
            os.kill(pid, number)


class Leg:
    """The part of a storm that one cluster lives through, with its jobs."""

    def __init__(self, storm: Storm, cluster: Cluster) -> None:
        self._storm = storm
        self._cluster = cluster
        self._number = itertools.count(1)
        self._job = self._hand_in()

    def run(self, faults: Iterator[StormFault]) -> None:
        """Strike until the storm is over or something is not survived; then let the job come to its end.

        Raises:
            AssertionError: something is not right; the message says what.
        """
        storm = self._storm
        self._wait_recovered("the first job")
        due = SYSTEM_CLOCK.monotonic()
        while not storm.is_over_at(due):
            due = SYSTEM_CLOCK.monotonic() + storm.options.every_seconds
            entry = self._play(next(faults))
            storm.note(entry)
            if not entry.outcome.survived:
                return
            due = max(due, SYSTEM_CLOCK.monotonic() + CALM_SECONDS)
            while SYSTEM_CLOCK.monotonic() < due and not storm.is_over_at(due):
                self._renew()
                SYSTEM_CLOCK.sleep(_LOOK_SECONDS)
            if not storm.is_over_at(due):
                self._renew()
                # Whoever is hit now is well: what an earlier fault has done is not blamed on the next one.
                self._wait_recovered("the last fault")
        self._wait_end()
        self._judge()

    def _hand_in(self) -> StormJob:
        return StormJob(self._cluster, next(self._number), survive=SURVIVE)

    def _renew(self) -> None:
        """Judge the job if it has ended, and hand the next one in."""
        if self._job.exit_status is not None:
            self._judge()
            self._job = self._hand_in()
            self._wait_recovered("the next job")

    def _judge(self) -> None:
        run_dir = self._job.run_dir
        verdict = self._job.verdict()
        used = {key: disk.used_bytes for key, disk in self._cluster.disks.items()}
        self._storm.note_job(run_dir, verdict.tally, unproven=verdict.lacking, used_bytes=used)
        assert not verdict.problems, f"{run_dir.name}: {'; '.join(verdict.problems[:5])}"
        if not self._storm.keeps_all:
            shutil.rmtree(run_dir, ignore_errors=True)

    def _play(self, fault: StormFault) -> Entry:
        """Do it, and wait until the job has got over it."""
        storm, job = self._storm, self._job
        job.screen.news()
        started = healed = SYSTEM_CLOCK.monotonic()
        lives = {key: len(kept.lives) for key, kept in self._cluster.kept.items()}
        sentence = ""
        try:
            Striker(self._cluster, job).strike(fault)
            healed = SYSTEM_CLOCK.monotonic()
            self._wait_recovered("the fault")
        except (AssertionError, HetpipeError, OSError) as error:
            sentence = " ".join(str(error).split())
        now = SYSTEM_CLOCK.monotonic()
        outcome = Outcome(
            case=fault,
            survived=not sentence,
            sentence=sentence,
            seconds=now - started,
            recovery_seconds=now - healed,
        )
        return Entry(
            number=storm.num_faults + 1,
            at_seconds=started - storm.began,
            outcome=outcome,
            job=f"{self._cluster.folder.name}/{job.run_dir.name}",
            screen=job.screen.news(),
            bystanders=list(self._bystanders(fault, lives)),
        )

    def _bystanders(self, fault: StormFault, lives: Mapping[str, int]) -> Iterator[str]:
        """Whoever ended although nobody struck it; a coordinator that may not reach Redis leads no more."""
        struck = fault.victims | ({COORDINATOR} if REDIS in fault.victims else set())
        for key, kept in self._cluster.kept.items():
            since = kept.lives[max(0, lives[key] - 1) :]
            if key not in struck and any(life.code is not None and not life.expected for life in since):
                yield f"{key}: {kept.story()}"

    def _wait_recovered(self, after: str) -> None:
        """Until everybody is back, the clock moves on and there is a new checkpoint, or the job has come to its end.

        Raises:
            AssertionError: it took too long, or the job failed.
        """
        job = self._job
        first: Position | None = None
        has_moved = False
        checkpoint = job.checkpoint()

        def is_recovered() -> bool:
            nonlocal first, has_moved
            if job.exit_status is not None:
                assert job.exit_status == 0, (
                    f"`hetpipe submit` ended with status {job.exit_status}: {job.follower.last_words()}; {job.story()}"
                )
                return self._cluster.is_whole
            position = job.position() if self._cluster.is_whole and job.follower.is_up else None
            if position is None:
                return False
            if first is None or position.rewinds != first.rewinds:
                first, has_moved = position, False
            has_moved = has_moved or position.clock >= first.clock + MOVES_WAVES
            return has_moved and job.checkpoint() not in {None, checkpoint}

        if not _comes_true(is_recovered, RECOVER_SECONDS):
            reached = "no new checkpoint" if has_moved else "not whole and moving"
            raise AssertionError(
                f"{reached} within {RECOVER_SECONDS:.0f} s after {after}: {self._cluster.story()}; {job.story()}"
            )

    def _wait_end(self) -> None:
        """Until the job has come to its end by itself, with nobody struck any more."""
        rest_seconds = witness_job.MAX_EPOCHS * witness_job.num_samples() * witness_job.pace_seconds()
        limit = RECOVER_SECONDS + 2.0 * rest_seconds
        ended = _comes_true(lambda: self._job.exit_status is not None, limit)
        assert ended, f"the last job does not come to its end within {limit:.0f} s: {self._job.story()}"


class Storm:
    """A storm under way."""

    def __init__(self, folder: Path, options: StormOptions, means: MountMeans, say: Say, *, keeps_all: bool) -> None:
        """Prepare.

        Args:
            folder: for clusters and the diary.
            options: how long, and which faults.
            means: how disks are mounted.
            say: hears how it goes.
            keeps_all: keep the folders of runs that were right, too.
        """
        self.options = options
        self.keeps_all = keeps_all
        self._folder = folder
        self._means = means
        self._say = say
        self._diary = folder / "storm.jsonl"
        self.began = SYSTEM_CLOCK.monotonic()
        self._entries: list[Entry] = []
        self._tally = Tally()
        self._problems: list[str] = []
        self._unproven: list[str] = []
        self._ended: float | None = None

    @property
    def num_faults(self) -> int:
        """So far."""
        return len(self._entries)

    def is_over_at(self, when: float) -> bool:
        """Whether no further fault is to come at this time, in monotonic seconds."""
        return self.options.is_over(elapsed=when - self.began, num_faults=self.num_faults)

    def run(self) -> None:
        """The whole storm. After something that is not survived it goes on with a new cluster."""
        self._folder.mkdir(parents=True, exist_ok=True)
        faults = schedule(self.options.seed, self.options.selection.admits)
        for number in itertools.count(1):
            folder = self._folder / f"cluster-{number}"
            before = len(self._problems)
            try:
                with Cluster(folder, self._layout()) as cluster:
                    self._say(f"{folder.name} is up")
                    Leg(self, cluster).run(faults)
            except (AssertionError, HetpipeError) as error:
                self._problems.append(f"{folder.name}: {' '.join(str(error).split())}")
                self._say(f"WRONG: {self._problems[-1]} (see {folder})")
            has_shown_nothing = len(self._problems) > before and self.num_faults == 0
            if self.is_over_at(SYSTEM_CLOCK.monotonic()) or has_shown_nothing:
                break
        self._ended = SYSTEM_CLOCK.monotonic()

    def note(self, entry: Entry) -> None:
        """Enter how a fault went."""
        self._entries.append(entry)
        self._write(entry.to_json())
        self._say(entry.line())

    def note_job(self, run_dir: Path, tally: Tally, *, unproven: Sequence[str], used_bytes: Mapping[str, int]) -> None:
        """Enter what the judges say of a job, and what is on the disks at its end."""
        self._tally += tally
        name = f"{run_dir.parents[3].name}/{run_dir.name}"
        self._unproven += [name] if unproven else []
        self._write({"job": name, "waves": tally.waves, "violations": tally.violations, "disk_bytes": dict(used_bytes)})
        disks = ", ".join(f"{key} {used / (1 << 20):.1f}" for key, used in used_bytes.items())
        told = f"; MiB on disks: {disks}" if disks else ""
        self._say(f"{name} came to its end: {tally.waves} waves, {tally.violations} violations{told}")

    def report(self, *, skipped: Mapping[str, str], again: str) -> StormReport:
        """What it has shown so far."""
        return StormReport(
            entries=self._entries,
            tally=self._tally,
            problems=self._problems,
            unproven=self._unproven,
            seconds=(self._ended or SYSTEM_CLOCK.monotonic()) - self.began,
            seed=self.options.seed,
            mounts=_MOUNTS[self._means],
            skipped=skipped,
            again=again,
        )

    def _layout(self) -> Layout:
        return Layout(devices=DEVICES, disk_bytes={} if self._means is MountMeans.NONE else DISK_BYTES)

    def _write(self, values: Mapping[str, object]) -> None:
        with self._diary.open("a") as file:
            file.write(json.dumps(values) + "\n")


_MOUNTS = {
    MountMeans.ROOT: "file systems of their own (tmpfs, as root)",
    MountMeans.USER_NAMESPACE: "file systems of their own (tmpfs, in a user namespace)",
    MountMeans.NONE: "ordinary folders, never filled",
}


def _comes_true(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = SYSTEM_CLOCK.monotonic() + seconds
    while not condition():
        if SYSTEM_CLOCK.monotonic() >= deadline:
            return False
        SYSTEM_CLOCK.sleep(_LOOK_SECONDS)
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.storm", description="Random faults, job after job.")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (%(default)s)")
    parser.add_argument("--faults", type=int, metavar="N", help="so many faults, however long it takes")
    parser.add_argument(
        "--every", type=float, default=EVERY_SECONDS, metavar="S", help="seconds between faults (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="which faults in which order (%(default)s)")
    for name, meaning in (("--only", "these faults alone"), ("--without", "all but these")):
        parser.add_argument(
            name, action="append", default=[], metavar="NAME", help=f"{meaning}: `kill/*`, `*/redis`; may be repeated"
        )
    parser.add_argument(
        "--samples", type=int, default=SAMPLES, metavar="N", help="samples of each job, so its length (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where everything goes (default: a new folder)")
    parser.add_argument("--keep", action="store_true", help="keep the folder where all went well, too")
    parser.add_argument("--list", action="store_true", help="print the faults in their order; do nothing")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Have a storm; the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    parsed = parser.parse_args(arguments)
    selection = Selection(only=tuple(parsed.only), without=tuple(parsed.without))
    options = StormOptions(
        seconds=60.0 * parsed.minutes,
        seed=parsed.seed,
        every_seconds=parsed.every,
        num_faults=parsed.faults,
        selection=selection,
    )
    if next(schedule(parsed.seed, selection.admits), None) is None:
        parser.error("no fault is left by --only and --without; --list names some")
    if parsed.list:
        count = parsed.faults or round(parsed.minutes * FAULTS_PER_MINUTE)
        faults = itertools.islice(schedule(parsed.seed, selection.admits), count)
        sys.stdout.write("".join(f"{fault.name}\n" for fault in faults))
        return 0
    means = in_namespace([sys.executable, "-m", "tests.chaos.storm", *arguments])
    return _storm(parsed, options, means, arguments)


def _storm(parsed: argparse.Namespace, options: StormOptions, means: MountMeans, arguments: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ[witness_job.SAMPLES_VARIABLE] = str(parsed.samples)
    skipped = {name: f"{reason}; whoever loses both hands it in again" for name, reason in BEYOND.items()}
    if means is MountMeans.NONE:
        options = _without_disks(options)
        skipped[f"{Deed.FILL_DISK}/*"] = "no disk of its own can be mounted here: that needs root or user namespaces"
    folder = (parsed.folder or Path(tempfile.mkdtemp(prefix="hetpipe-storm-"))).absolute()
    storm = Storm(folder, options, means, _say, keeps_all=parsed.keep)
    _say(f"seed {options.seed}, everything is in {folder}")
    is_interrupted = False
    try:
        storm.run()
    except KeyboardInterrupt:
        is_interrupted = True
    seed = () if any(each.startswith("--seed") for each in arguments) else ("--seed", str(options.seed))
    again = shlex.join(["python", "-m", "tests.chaos.storm", *arguments, *seed])
    report = storm.report(skipped=skipped, again=again)
    keeps = parsed.keep or not report.ok or is_interrupted
    where = f"everything is in {folder}" if keeps else "nothing was kept; --keep does"
    sys.stdout.write("\n".join([*report.lines(), where, ""]))
    if parsed.json:
        sys.stdout.write(json.dumps(report.to_json()) + "\n")
    sys.stdout.flush()
    if not keeps:
        shutil.rmtree(folder, ignore_errors=True)
    if is_interrupted:
        return 128 + signal.SIGINT
    return 0 if report.ok else 1


def _without_disks(options: StormOptions) -> StormOptions:
    selection = Selection(only=options.selection.only, without=(*options.selection.without, f"{Deed.FILL_DISK}/*"))
    return StormOptions(
        seconds=options.seconds,
        seed=options.seed,
        every_seconds=options.every_seconds,
        num_faults=options.num_faults,
        selection=selection,
    )


def _say(line: str) -> None:
    sys.stderr.write(f"  {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
