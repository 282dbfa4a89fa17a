"""One history: a setting, what goes wrong, and whether every promise held. Nothing here reads a clock or a file.

While faults happen nothing breaks. Afterwards everything goes on, or says why not; and in the end nothing is left.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from structlog.testing import capture_logs

from hetpipe.errors import UnknownJob
from hetpipe.values.events import StopMode
from tests.simulation.coordinator_promises import Broken, CoordinatorPromises
from tests.simulation.faults import Faults
from tests.simulation.setting import Setting
from tests.simulation.world import STEP_SECONDS, World

#: How long everything may take to be well again once nothing goes wrong any more, and to end once it is told to.
_WELL_SECONDS = 400.0
_ENDED_SECONDS = 700.0

#: How long somebody may be away before that, and after how long everybody knows of it.
_AWAY_SECONDS, _TOLD_SECONDS = 100.0, 30.0

#: How long a job may take to begin, where faults wait for that.
_BEGUN_SECONDS = 60.0

#: How long processes and shards may need to notice that a job has ended.
_CLEARED_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class History:
    """What happened under a setting."""

    seed: int
    seconds: float
    """Of simulated time."""
    terms: int
    records: int
    lives: int
    faults: tuple[str, ...]
    violation: str | None
    story: tuple[str, ...]


class _Play:
    """One history under way."""

    def __init__(self, folder: Path, setting: Setting, *, traces: bool) -> None:
        self.setting = setting
        self.world = World(folder, setting, traces=traces)
        self.random = self.world.random
        self.faults = Faults(self.world)
        self.promises = CoordinatorPromises(self.world)

    def _step(self) -> None:
        self.world.step()
        self.promises.check()

    def _wait(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_SECONDS)):
            self._step()

    def begin(self) -> None:
        """Hand the job in, and let it get under way."""
        self.world.submit()
        if self.setting.first is not None:
            self._wait(self.setting.first)
            return
        for _ in range(round(_BEGUN_SECONDS / STEP_SECONDS)):
            self._step()
            if any(served.log.newest_segment is not None for served in self.world.shards.all[0].jobs.values()):
                return
        raise Broken(f"the job has not begun after {_BEGUN_SECONDS:.0f} s without a fault")

    def suffer(self) -> None:
        """Let things go wrong."""
        for step in range(self.setting.steps):
            if step == self.setting.another_at and self.world.coordinator is not None and not self.world.store.away:
                self.world.submit()
            if self.random.random() < self.setting.often:
                for _ in range(self.random.choice(self.setting.bursts)):
                    self.faults.one()
            self._step()

    def settle(self) -> None:
        """Nothing goes wrong any more: everything is well again."""
        if self.setting.does_without:
            self._do_without(self.random.choice([*self.world.agents, "ps0", "ps1", *[""] * 5]))
        self.faults.heal()
        for _ in range(round(_WELL_SECONDS / STEP_SECONDS)):
            self._step()
            wrong = [why for job in self.world.jobs if (why := self.promises.why_not_well(job))]
            if not wrong:
                return
        raise Broken(f"after {_WELL_SECONDS:.0f} s without a fault: {wrong}")

    def _do_without(self, name: str) -> None:
        """All is well but for one who is away for long: a job goes on without it, or says for whom it waits."""
        if not name:
            return
        self.faults.heal()
        for step in range(round(_AWAY_SECONDS / STEP_SECONDS)):
            if name.startswith("ps"):
                self.world.shards.all[int(name[2:])].kill()
            else:
                self.world.agents[name].die()
            self._step()
            for job in self.world.jobs if step * STEP_SECONDS > _TOLD_SECONDS else ():
                self.promises.check_told(job)

    def end(self) -> None:
        """All jobs end, those without an end because they are told to stop, and nothing is left of them."""
        assert self.world.coordinator is not None
        for job in () if self.setting.is_short else self.world.jobs:
            with suppress(UnknownJob):
                self.world.coordinator.stop_job(job, StopMode.CHECKPOINT)
        for _ in range(round(_ENDED_SECONDS / STEP_SECONDS)):
            self._step()
            if all(self.world.has_ended(job) for job in self.world.jobs):
                break
        else:
            pending = [
                served.log.pending_publish_reason()
                for served in self.world.shards.all[0].jobs.values()
                if served.server
            ]
            raise Broken(f"P5: {self.world.jobs} have not ended {_ENDED_SECONDS:.0f} s later: {pending}")
        for _ in range(round(_CLEARED_SECONDS / STEP_SECONDS)):
            left = [found for job in self.world.jobs if (found := self.promises.left_over(job))]
            if not left:
                break
            self._step()
        else:
            raise Broken(left[0])
        for job in self.world.jobs:
            self.promises.check_finished(job)


def play(setting: Setting, *, traces: bool = False) -> History:
    """The history of a setting; what broke is in it."""
    violation = None
    with TemporaryDirectory(prefix="hetpipe-history-") as folder:
        history = _Play(Path(folder), setting, traces=traces)
        with capture_logs() as logs:
            try:
                history.begin()
                history.suffer()
                history.settle()
                history.end()
            except Exception as error:  # noqa: BLE001 - whatever a machine raises where it should not
                violation = f"{type(error).__name__}: {error}"
    errors = [line for line in logs if line["log_level"] == "error"]
    if violation is None and errors:
        violation = f"an error in a log: {errors[0]}"
    runs = history.world.shards.runs.values()
    return History(
        setting.seed,
        history.world.now,
        len(runs),
        sum(len(run.promises.records) for run in runs),
        sum(len(run.stages) for run in runs),
        tuple(sorted(history.faults.kinds)),
        violation,
        tuple(history.faults.story),
    )
