"""Every exception hetpipe raises, in one tree.

The four branches are the four kinds of fault: the user's input (`UserError`), a peer that broke the protocol
(`ProtocolViolation`), the network or a process that went away (`Unavailable`), or a run that ended badly
(`JobFailed`). The class name is the wire name: `wire.status` maps each class to one gRPC status and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal


class HetpipeError(Exception):
    """Base of everything hetpipe raises on purpose. `str(error)` is one sentence fit for a user."""


class UserError(HetpipeError, ValueError):
    """The user's input cannot be used; the message names the fix."""


class JobError(UserError):
    """A job file is wrong. `problems` holds every mistake found, each as `path: what and how to fix it`."""

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("; ".join(self.problems))


class DocumentError(UserError):
    """A profile, cluster or plan file is wrong. `problems` holds every mistake found, each as `path: what and fix`.

    `what` names the file; it is empty where the problems are of several files and each begins with the name of its own.
    """

    def __init__(self, what: str, problems: Sequence[str] = ()) -> None:
        self.what = what
        self.problems: tuple[str, ...] = tuple(problems)
        super().__init__(": ".join(part for part in (what, "; ".join(self.problems)) if part))

    @property
    def sentences(self) -> tuple[str, ...]:
        """Every mistake with the name of its file."""
        return tuple(f"{self.what}: {problem}" for problem in self.problems) if self.what else self.problems


class CallableError(UserError):
    """A `module:callable` of the job cannot be imported or returns the wrong type."""


class PlanError(UserError):
    """The model does not fit the requested cut or the cluster."""


class InfeasiblePlan(PlanError):
    """No cut and no order of the devices fits their memory; the message has the shortage and possible fixes."""


class CheckpointError(UserError):
    """A checkpoint is missing, torn, or of another job."""


class ProtocolViolation(HetpipeError):
    """A peer sent something the protocol forbids; nothing was applied and the receiver lives on."""


class StaleTerm(ProtocolViolation):
    """The request carries another term than the receiver's."""


class StaleIncarnation(ProtocolViolation):
    """The request comes from an earlier incarnation of a virtual worker, or from one that is no member."""


class WaveOutOfOrder(ProtocolViolation):
    """A wave is negative, was skipped, lies in the future or behind a barrier."""


class SliceMismatch(ProtocolViolation):
    """A name, shape, dtype or size differs from the plan. Raised before anything is allocated."""


class MalformedChunk(ProtocolViolation):
    """A tensor chunk is truncated, out of order, or points outside its slice."""


class NonFiniteUpdate(ProtocolViolation):
    """A loss, gradient or update holds NaN or infinity; the whole wave is refused before it applies."""

    def __init__(
        self, message: str, *, minibatch: int | None = None, parameter: str = "", minibatches: range = range(0)
    ) -> None:
        #: The minibatch in which it began, as far as that is known, and the parameter; empty for a loss.
        self.minibatch = minibatch
        self.parameter = parameter
        #: The minibatches whose gradient or update it may be; empty for a loss, and where that is not known.
        self.minibatches = minibatches
        super().__init__(message)

    @classmethod
    def in_parameter(
        cls, parameter: str, *, quantity: Literal["gradient", "update"], minibatches: range
    ) -> NonFiniteUpdate:
        """The gradient or the update of one of `minibatches`, at least one, is not finite in `parameter`."""
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
    """A pull or hold names a clock that is not published yet; retry after its publication."""


class BuffersMissing(ClockNotPublished):
    """Model buffers that this peer itself sent are missing; resend them, and retry."""


class ClockFreed(ProtocolViolation):
    """A pull names a clock that is no longer retained."""


class MalformedFrame(ProtocolViolation):
    """A frame between stages breaks its format or the limits of the link. Raised before anything is allocated."""


class UnknownMember(ProtocolViolation):
    """The membership is unknown to the coordinator, or replaced by a newer registration; register again."""


class MemberReplaced(UnknownMember):
    """Another process has registered under this member's id; do not register again, or the two take turns for ever."""


class VersionConflict(ProtocolViolation):
    """Another writer replaced the record first; read it again."""


class InvalidTransition(HetpipeError):
    """A transition that the table of its lifecycle does not have; the message has the recent transitions."""


class Unavailable(HetpipeError):
    """A process or the network is unreachable. The message names peer, role, call, elapsed time and event."""


class PeerUnreachable(Unavailable):
    """No connection to a peer, or it broke."""


class DeadlineExceeded(Unavailable):
    """A peer is there but did not answer in time."""


class DamagedChunk(Unavailable):
    """A tensor chunk fails its checksum; nothing of it was used, and a resend may help."""


class LinkClosed(Unavailable):
    """The neighbouring stage's end of a link went away."""

    def __init__(self, message: str, *, orderly: bool = False) -> None:
        #: True after an orderly close by either end; False after a crash.
        self.orderly = orderly
        super().__init__(message)


class ResourceExhausted(HetpipeError):
    """A stated limit is reached (message size, watchers, memory)."""


class Busy(ResourceExhausted):
    """The server's limit for this peer is reached; nothing was done, retry soon."""


class DurabilityLost(ResourceExhausted):
    """A disk fails to persist state; the process goes on, but a restart would lose that state."""


class HistoryIncomplete(ResourceExhausted):
    """A disk fails to take a history file; the run goes on, and cannot be checked to its end."""


class StateLost(HetpipeError):
    """Persistent state of a process is missing, damaged, or of another job; it cannot be recovered."""


class PortInUse(ResourceExhausted):
    """The address to listen on is taken."""


class CheckpointNotWritten(ResourceExhausted):
    """A checkpoint could not be written whole and was given up; the one before it stays."""


class Unauthenticated(HetpipeError):
    """A peer failed to authenticate, or rejected this process's certificate; the message has the reason."""


class PermissionDenied(HetpipeError):
    """The authenticated peer may not make this call, or not on behalf of another process."""


class StoreUnavailable(Unavailable):
    """The coordinator's store (Redis) cannot be reached."""


class StoreDamaged(HetpipeError):
    """A counter in the coordinator's store is exhausted; `hetpipe repair store` repairs it."""


class NotLeader(Unavailable):
    """This coordinator does not lead, or no longer; another one acts."""


class InjectedFault(HetpipeError):
    """A failure injected by a test (`hetpipe.failpoints`)."""


class NobodyLeads(HetpipeError):
    """A coordinator answers, but the job has had no leader for minutes; whether it goes on is unknown."""


class JobFailed(HetpipeError):
    """A run ended before it was finished; the message is one sentence that names the failed process and the cause."""
