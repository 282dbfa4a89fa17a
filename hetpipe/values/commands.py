"""Commands from the coordinator to an agent, and the agent's reports.

Commands are numbered per registration and executed in order; each is idempotent, so a duplicate is harmless.
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

#: Maximum number of characters reported of a process's last line.
_LAST_WORDS_CHARACTERS = 300


@dataclass(frozen=True, slots=True, order=True)
class StageKey:
    """Identifies one incarnation of one stage process."""

    job_id: JobId
    vw: VirtualWorkerIndex
    stage: StageIndex
    incarnation: Incarnation
    term: Term
    """Term of the job: after a rewind incarnations are numbered from 0 again."""

    @property
    def peer(self) -> StagePeer:
        """The identity of that process towards others."""
        return StagePeer(self.job_id, self.vw, self.stage, self.incarnation, self.term)

    def __str__(self) -> str:
        """Name for use in messages."""
        return stage_name(self.vw, self.stage)


def end_key(job_id: JobId, number: int, *, is_first: bool) -> StageKey:
    """The key of the process at one end of a measured link: a stage of term 0, which no plan has."""
    stage = StageIndex(0 if is_first else 1)
    return StageKey(job_id, VirtualWorkerIndex(0), stage, Incarnation(number), Term(0))


def stage_name(vw: VirtualWorkerIndex, stage: StageIndex) -> str:
    """A stage's name for use in messages."""
    return f"stage {stage} of virtual worker {vw}"


@dataclass(frozen=True, slots=True)
class InspectCommand:
    """Import the user's code in a separate process; report the model, measure it, or both."""

    job_id: JobId
    job_json: str
    """The validated job, as JSON text."""
    import_path: str
    """Folder that is put first on the module search path."""
    run_dir: str
    with_model: bool = True
    """Report the model."""
    measure: tuple[str, ...] = ()
    """Device types of the agent on which the model is measured."""
    code: str = ""
    """Digest of the code that was sent along with the job; empty for none."""


@dataclass(frozen=True, slots=True)
class StartStageCommand:
    """Start one stage process."""

    job_id: JobId
    config: StageConfig
    code: str = ""
    """Digest of the code that was sent along with the job; empty for none."""

    @property
    def key(self) -> StageKey:
        """Key of the stage to start."""
        return StageKey(self.job_id, self.config.vw, self.config.stage, self.config.incarnation, self.config.plan.term)


@dataclass(frozen=True, slots=True)
class StopJobCommand:
    """End all processes of a job: SIGTERM, then SIGKILL for those still running."""

    job_id: JobId


@dataclass(frozen=True, slots=True)
class StopVirtualWorkerCommand:
    """End one virtual worker's processes up to and including an incarnation: SIGKILL, as none of its work counts."""

    job_id: JobId
    vw: VirtualWorkerIndex
    incarnation: Incarnation
    term: Term
    """Term of that incarnation; those of earlier terms end, too."""

    def means(self, key: StageKey) -> bool:
        """Whether the command applies to the process `key`."""
        is_of_it = (key.job_id, key.vw) == (self.job_id, self.vw)
        return is_of_it and (key.term, key.incarnation) <= (self.term, self.incarnation)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTask:
    """One end of a link between two nodes that is being measured."""

    number: Count
    """Number of the measurement among those for the job."""
    other: Annotated[AgentId, Field(max_length=MAX_NAME_CHARACTERS)]
    """The agent at the other end."""
    run_dir: str
    """Folder of the run, for the log of the measuring process; empty: no run, and no log."""
    link: AskedLink = "auto"
    """The job's key `link`: both ends choose the kind of link from it, as stages do."""
    address: Name = ""
    """Address on which the other end accepts this one; empty: accept it, and measure."""
    with_copies: bool = False
    """Measure copies between host memory and this node's devices, too."""


@dataclass(frozen=True, slots=True)
class MeasureLinkCommand:
    """Measure the link to another agent's node, or serve as its peer; in a separate process."""

    job_id: JobId
    """The job that will be planned with it."""
    task: LinkTask


@dataclass(frozen=True, slots=True)
class KeepLinksCommand:
    """Store another agent's measurement of a link to this node."""

    job_id: JobId
    """The job for which it was measured."""
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
    """A command with its position in the agent's stream, from 1."""

    sequence: int
    command: Command


@dataclass(frozen=True, slots=True)
class KeyedStageReport:
    """A report of one stage process."""

    key: StageKey
    report: StageReport

    @property
    def job_id(self) -> JobId:
        """The job the stage belongs to."""
        return self.key.job_id


@dataclass(frozen=True, slots=True)
class InspectionResult:
    """Outcome of an inspection: the requested results, or an error with every mistake found."""

    job_id: JobId
    model: ModelReport | None
    error: str = ""
    """Class name in `hetpipe.errors`, or of the Python exception; empty on success."""
    problems: tuple[str, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    """One per measured device type."""


@dataclass(frozen=True, slots=True)
class InspectionStep:
    """Progress of an inspection: it is about to measure another layer."""

    job_id: JobId
    step: ProfileStep


@dataclass(frozen=True, slots=True)
class InspectionPhase:
    """Current phase of an inspection (`hetpipe.phases`); serves as a sign of life."""

    job_id: JobId
    phase: str
    """Completes the phrase "it is ..."."""
    seconds: float
    """Duration of the phase so far."""


@dataclass(frozen=True, slots=True)
class LinkAwaited:
    """The first end of a measured link is waiting for the second one."""

    job_id: JobId
    number: int
    """Id of the `LinkTask`."""
    address: str
    """`HOST:PORT`."""


@dataclass(frozen=True, slots=True)
class LinkResult:
    """Outcome of a link measurement at one end."""

    job_id: JobId
    number: int
    """Id of the `LinkTask`."""
    measured: MeasuredLinks = MeasuredLinks()
    """The link, from the measuring end; copies, if requested."""
    problem: str = ""
    """Why the measurement failed; empty on success."""


@dataclass(frozen=True, slots=True)
class ChildExit:
    """A stage process has exited."""

    key: StageKey
    pid: int
    exit_code: int
    """Exit status, or minus the number of the signal that ended it."""
    last_output: str = ""
    """The last line of its log, for the error message."""
    ordered: bool = False
    """Whether the agent ended it on `StopVirtualWorkerCommand`."""

    @property
    def job_id(self) -> JobId:
        """The job the stage belongs to."""
        return self.key.job_id


def exit_sentence(exit_code: int) -> str:
    """The exit of a process, as the predicate of a sentence.

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
    """The last line of a process's output, for the same sentence; empty without output.

    >>> last_words(["starting", "  no devices ", ""])
    'no devices'
    """
    return next((line.strip()[:_LAST_WORDS_CHARACTERS] for line in reversed(lines) if line.strip()), "")


AgentReport = (
    KeyedStageReport | InspectionStep | InspectionPhase | InspectionResult | LinkAwaited | LinkResult | ChildExit
)
