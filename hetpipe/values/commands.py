"""What the coordinator tells an agent to do, and what an agent tells back.

Commands are numbered per registration and carried out in order; each is idempotent, so a repeated one does no harm.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from hetpipe.values.bounds import MAX_NAME_CHARACTERS, Count, Name
from hetpipe.values.identity import StagePeer
from hetpipe.values.ids import AgentId, Incarnation, JobId, StageIndex, Term, VirtualWorkerIndex
from hetpipe.values.link_measurement import MeasuredLinks
from hetpipe.values.measurement import Measurement, ProfileStep
from hetpipe.values.plan import ModelReport
from hetpipe.values.policies import AskedLink
from hetpipe.values.run import StageConfig, StageReport

#: How much of a process's last line is told.
_LAST_WORDS_CHARACTERS = 300


@dataclass(frozen=True, slots=True, order=True)
class StageKey:
    """Names one life of one stage process."""

    job_id: JobId
    vw: VirtualWorkerIndex
    stage: StageIndex
    incarnation: Incarnation
    term: Term
    """Of the job: after a rewind lives are counted from 0 again."""

    @property
    def peer(self) -> StagePeer:
        """Who that process is to others."""
        return StagePeer(self.job_id, self.vw, self.stage, self.incarnation, self.term)

    def __str__(self) -> str:
        """Name for a sentence."""
        return stage_name(self.vw, self.stage)


def end_key(job_id: JobId, number: int, *, is_first: bool) -> StageKey:
    """What the process at one end of a link that is measured is called: a stage of the term 0, which no plan has."""
    stage = StageIndex(0 if is_first else 1)
    return StageKey(job_id, VirtualWorkerIndex(0), stage, Incarnation(number), Term(0))


def stage_name(vw: VirtualWorkerIndex, stage: StageIndex) -> str:
    """A stage's name for a sentence."""
    return f"stage {stage} of virtual worker {vw}"


@dataclass(frozen=True, slots=True)
class InspectCommand:
    """Import the user's code in a process of its own; report the model, measure it, or both."""

    job_id: JobId
    job_json: str
    """The validated job, as JSON text."""
    import_path: str
    """Folder that goes first on the module search path."""
    run_dir: str
    with_model: bool = True
    """Report the model."""
    measure: tuple[str, ...] = ()
    """Device types of the agent's that the model is measured on."""


@dataclass(frozen=True, slots=True)
class StartStageCommand:
    """Start one stage process."""

    job_id: JobId
    config: StageConfig

    @property
    def key(self) -> StageKey:
        """The stage this starts."""
        return StageKey(self.job_id, self.config.vw, self.config.stage, self.config.incarnation, self.config.plan.term)


@dataclass(frozen=True, slots=True)
class StopJobCommand:
    """End all processes of a job: SIGTERM, and SIGKILL for those that stay."""

    job_id: JobId


@dataclass(frozen=True, slots=True)
class StopVirtualWorkerCommand:
    """End the processes of one virtual worker, up to and with a life: SIGKILL, for nothing counts."""

    job_id: JobId
    vw: VirtualWorkerIndex
    incarnation: Incarnation
    term: Term
    """Of that life; those of earlier terms end, too."""

    def means(self, key: StageKey) -> bool:
        """Whether the process of `key` is to end."""
        is_of_it = (key.job_id, key.vw) == (self.job_id, self.vw)
        return is_of_it and (key.term, key.incarnation) <= (self.term, self.incarnation)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTask:
    """One end of a link between two nodes that is measured."""

    number: Count
    """Of the measurement, among those for the job."""
    other: Annotated[AgentId, Field(max_length=MAX_NAME_CHARACTERS)]
    """The agent of the other end."""
    run_dir: str
    """Folder of the run, for the log of the process that measures; empty: for no run, and no log."""
    link: AskedLink = "auto"
    """The job's key `link`: both ends choose the kind of link from it, as stages do."""
    address: Name = ""
    """Where the other end awaits this one; empty: await it, and measure."""
    with_copies: bool = False
    """Measure copies between memory and this node's devices, too."""


@dataclass(frozen=True, slots=True)
class MeasureLinkCommand:
    """Measure the link to another agent's node, or help it to; in a process of its own."""

    job_id: JobId
    """The job that is to be planned with it."""
    task: LinkTask


@dataclass(frozen=True, slots=True)
class KeepLinksCommand:
    """Remember what another agent has measured of a link to this node."""

    job_id: JobId
    """The job that it was measured for."""
    measured: MeasuredLinks


Command = (
    InspectCommand
    | StartStageCommand
    | StopJobCommand
    | StopVirtualWorkerCommand
    | MeasureLinkCommand
    | KeepLinksCommand
)


@dataclass(frozen=True, slots=True)
class NumberedCommand:
    """A command and its place in the agent's stream, from 1."""

    sequence: int
    command: Command


@dataclass(frozen=True, slots=True)
class StageNews:
    """One report of one stage process."""

    key: StageKey
    report: StageReport

    @property
    def job_id(self) -> JobId:
        """The job the stage belongs to."""
        return self.key.job_id


@dataclass(frozen=True, slots=True)
class InspectionResult:
    """How an inspection ended: with what was asked for, or with an error and every mistake found."""

    job_id: JobId
    model: ModelReport | None
    error: str = ""
    """Class name in `hetpipe.errors`, or of the Python exception; empty if it went well."""
    problems: tuple[str, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    """One per device type that was measured."""


@dataclass(frozen=True, slots=True)
class InspectionStep:
    """An inspection is about to measure another layer."""

    job_id: JobId
    step: ProfileStep


@dataclass(frozen=True, slots=True)
class InspectionPhase:
    """What an inspection is doing (`hetpipe.phases`): it lives."""

    job_id: JobId
    phase: str
    """The end of "it is ..."."""
    seconds: float
    """For how long."""


@dataclass(frozen=True, slots=True)
class LinkAwaited:
    """The first end of a link that is measured awaits the second one."""

    job_id: JobId
    number: int
    """Of the `LinkTask`."""
    address: str
    """`HOST:PORT`."""


@dataclass(frozen=True, slots=True)
class LinkResult:
    """How the measurement of a link has ended at one end."""

    job_id: JobId
    number: int
    """Of the `LinkTask`."""
    measured: MeasuredLinks = MeasuredLinks()
    """The link, from the end that measured it; copies, where they were asked for."""
    problem: str = ""
    """Why nothing came of it; empty if it went well."""


@dataclass(frozen=True, slots=True)
class ChildExit:
    """A stage process has ended."""

    key: StageKey
    pid: int
    exit_code: int
    """Exit status, or minus the number of the signal that ended it."""
    last_output: str = ""
    """The last line it wrote to its log, for the error message."""
    ordered: bool = False
    """Whether the agent ended it on `StopVirtualWorkerCommand`."""

    @property
    def job_id(self) -> JobId:
        """The job the stage belongs to."""
        return self.key.job_id


def exit_sentence(exit_code: int) -> str:
    """How a process ended, as the predicate of a sentence.

    >>> exit_sentence(-9), exit_sentence(3)
    ('was killed by SIGKILL', 'ended with exit code 3')
    """
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def last_words(lines: Sequence[str]) -> str:
    """What a process said last, for the same sentence; empty if it said nothing.

    >>> last_words(["starting", "  no devices ", ""])
    'no devices'
    """
    return next((line.strip()[:_LAST_WORDS_CHARACTERS] for line in reversed(lines) if line.strip()), "")


AgentNews = StageNews | InspectionStep | InspectionPhase | InspectionResult | LinkAwaited | LinkResult | ChildExit
