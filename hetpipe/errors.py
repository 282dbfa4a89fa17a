"""Every exception hetpipe raises, in one tree.

The branches are kinds of fault: the user's input (`UserError`), a peer that violated the protocol
(`ProtocolViolation`), the network or an unavailable process (`Unavailable`), or a failed run (`JobFailed`). The class
name is the name on the wire: `wire.status` maps each class to one gRPC status and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal


class HetpipeError(Exception):
    """Base class of all exceptions raised deliberately. `str(error)` is one sentence for the user."""


class UserError(HetpipeError, ValueError):
    """The user's input is invalid; the message names the fix."""


class JobError(UserError):
    """A job file is invalid. `problems` lists every mistake, each as `path: what and how to fix it`."""

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("; ".join(self.problems))


class DocumentError(UserError):
    """A profile, cluster or plan file is invalid. `problems` lists every mistake, each as `path: what and fix`.

    `what` names the file; it is empty if the problems concern several files, whose names they then begin with.
    """

    def __init__(self, what: str, problems: Sequence[str] = ()) -> None:
        self.what = what
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__(": ".join(part for part in (what, "; ".join(self.problems)) if part))

    @property
    def sentences(self) -> tuple[str, ...]:
        """Every mistake, with the name of its file."""
        return tuple(f"{self.what}: {problem}" for problem in self.problems) if self.what else self.problems


class CallableError(UserError):
    """A `module:callable` of the job cannot be imported or returns the wrong type."""


class PlanError(UserError):
    """The model does not fit the requested cut or the cluster."""


class InfeasiblePlan(PlanError):
    """No cut and no order of the devices fits in memory; the message states the shortage and possible fixes."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or of another job."""


class ProtocolViolation(HetpipeError):
    """A peer sent something that the protocol forbids; it had no effect, and the receiver continues."""


class StaleTerm(ProtocolViolation):
    """The term of the request differs from the receiver's."""


class StaleIncarnation(ProtocolViolation):
    """The request comes from an earlier incarnation of a virtual worker, or from a non-member."""


class WaveOutOfOrder(ProtocolViolation):
    """A wave is negative, skipped, in the future, or after a barrier."""


class SliceMismatch(ProtocolViolation):
    """A name, shape, dtype or size differs from the plan. Raised before any allocation."""


class MalformedChunk(ProtocolViolation):
    """A tensor chunk is truncated, out of order, or outside its slice."""


class NonFiniteUpdate(ProtocolViolation):
    """A loss, gradient or update contains NaN or infinity; the whole wave is rejected before it is applied."""

    def __init__(
        self, message: str, *, minibatch: int | None = None, parameter: str = "", minibatches: range = range(0)
    ) -> None:
        #: The minibatch in which it began, if known, and the parameter; empty for a loss.
        self.minibatch = minibatch
        self.parameter = parameter
        #: Candidates for the minibatch whose gradient or update it is; empty for a loss, or if unknown.
        self.minibatches = minibatches
        super().__init__(message)

    @classmethod
    def in_parameter(
        cls, parameter: str, *, quantity: Literal["gradient", "update"], minibatches: range
    ) -> NonFiniteUpdate:
        """Error for a gradient or update of one of `minibatches` (at least one) that is not finite in `parameter`."""
        first, last = minibatches[0], minibatches[-1]
        which = f"minibatch {last}" if first == last else f"one of the minibatches {first} to {last}"
        return cls(
            f"the {quantity} of {which} is not finite in parameter {parameter}",
            minibatch=last if first == last else None,
            parameter=parameter,
            minibatches=minibatches,
        )


class UnknownJob(ProtocolViolation):
    """The job is unknown to the receiver."""


class ClockNotPublished(ProtocolViolation):
    """A pull or hold refers to a clock that is not published yet; retry after its publication."""


class BuffersMissing(ClockNotPublished):
    """Model buffers sent by this peer are missing; resend them, and retry."""


class ClockFreed(ProtocolViolation):
    """A pull refers to a clock that is no longer retained."""


class MalformedFrame(ProtocolViolation):
    """A frame between stages violates its format or the limits of the link. Raised before any allocation."""


class UnknownMember(ProtocolViolation):
    """The membership is unknown to the coordinator, or replaced by a newer registration; register again."""


class MemberReplaced(UnknownMember):
    """Another process has registered this member id; do not register again, or both would alternate forever."""


class VersionConflict(ProtocolViolation):
    """Another writer replaced the record first; read it again."""


class InvalidTransition(HetpipeError):
    """The transition is not in the table of its lifecycle; the message lists the recent transitions."""


class Unavailable(HetpipeError):
    """A process or the network is unavailable. The message names peer, role, call, elapsed time and event."""


class PeerUnreachable(Unavailable):
    """A connection to a peer failed or was lost."""


class DeadlineExceeded(Unavailable):
    """A peer is connected but did not answer in time."""


class DamagedChunk(Unavailable):
    """The checksum of a tensor chunk does not match; the chunk was discarded, and a resend may succeed."""


class LinkClosed(Unavailable):
    """The neighbouring stage's end of a link is closed."""

    def __init__(self, message: str, *, orderly: bool = False) -> None:
        #: True after an orderly close by either end; False after a crash.
        self.orderly = orderly
        super().__init__(message)


class ResourceExhausted(HetpipeError):
    """A documented limit is reached (message size, watchers, memory)."""


class Busy(ResourceExhausted):
    """The server's limit for this peer is reached; the request had no effect, retry soon."""


class DurabilityLost(ResourceExhausted):
    """A disk fails to persist state; the process continues, but a restart would lose that state."""


class HistoryIncomplete(ResourceExhausted):
    """A disk fails to store a history file; the run continues, but its end cannot be checked."""


class DataWorkerLost(ResourceExhausted):
    """A process that reads data has died or hangs; the stage's next incarnation starts new ones."""


class StateLost(HetpipeError):
    """Persistent state of a process is missing, damaged, or of another job, and cannot be recovered."""


class PortInUse(ResourceExhausted):
    """The address to listen on is in use."""


class CheckpointNotWritten(ResourceExhausted):
    """A checkpoint could not be completed and was abandoned; the previous one is kept."""


class Unauthenticated(HetpipeError):
    """A peer failed to authenticate, or rejected this process's certificate; the message has the reason."""


class PermissionDenied(HetpipeError):
    """The authenticated peer is not authorised for this call, or not on behalf of another process."""


class StoreUnavailable(Unavailable):
    """The coordinator's store (Redis) cannot be reached."""


class StoreDamaged(HetpipeError):
    """A counter in the coordinator's store is exhausted; `hetpipe repair store` repairs it."""


class NotLeader(Unavailable):
    """This coordinator is not, or no longer, the leader; another one is."""


class InjectedFault(HetpipeError):
    """A failure injected by a test (`hetpipe.failpoints`)."""


class NobodyLeads(HetpipeError):
    """A coordinator answers, but the job has had no leader for minutes; whether the job continues is unknown."""


class JobFailed(HetpipeError):
    """A run ended before completion; the message is one sentence with the failed process and the cause."""


class ScriptFailed(JobFailed):
    """A line of the job's script of changes cannot be done; the message names it. The run ends at a barrier."""
