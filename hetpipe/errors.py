"""Every exception hetpipe raises, in one tree.

The four branches say whose fault it is: the user's input (`UserError`), a peer that broke the protocol
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
    """A `module:callable` of the job cannot be imported or does not return what it must."""


class PlanError(UserError):
    """The model does not fit the asked-for cut or the cluster."""


class InfeasiblePlan(PlanError):
    """No cut and no order of the devices fits their memory; the message says what is missing and what would help."""


class CheckpointError(UserError):
    """A checkpoint is missing, torn, or of another job."""


class ProtocolViolation(HetpipeError):
    """A peer sent something the protocol forbids; nothing was applied and the receiver lives on."""


class StaleTerm(ProtocolViolation):
    """The request carries another term than the receiver's."""


class StaleIncarnation(ProtocolViolation):
    """The request comes from an earlier life of a virtual worker, or from one that is no member."""


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
    """The receiver does not know this job."""


class ClockNotPublished(ProtocolViolation):
    """A pull or hold names a clock that is not published yet; ask again after its notice."""


class BuffersMissing(ClockNotPublished):
    """Model buffers that this peer itself sent are not here (any more); send them again, and ask again."""


class ClockFreed(ProtocolViolation):
    """A pull names a clock that no member could ask for any more."""


class MalformedFrame(ProtocolViolation):
    """A frame between stages breaks its format or the limits of the link. Raised before anything is allocated."""


class UnknownMember(ProtocolViolation):
    """The coordinator does not know this membership, or a newer registration replaced it; register again."""


class MemberReplaced(UnknownMember):
    """Another process has registered under this member's id; do not register again, or the two take turns for ever."""


class VersionConflict(ProtocolViolation):
    """Another writer replaced the record first; read it again."""


class InvalidTransition(HetpipeError):
    """A lifecycle was asked for a step its table does not have; the message tells the recent story."""


class Unavailable(HetpipeError):
    """A process or the network is gone. The message names peer, role, call, elapsed time and what was awaited."""


class PeerUnreachable(Unavailable):
    """No connection to a peer, or it broke."""


class DeadlineExceeded(Unavailable):
    """A peer is there but did not answer in time."""


class DamagedChunk(Unavailable):
    """A tensor chunk's bytes are not those that were sent; nothing of it was used, and sending again may help."""


class LinkClosed(Unavailable):
    """The neighbouring stage's end of a link went away."""

    def __init__(self, message: str, *, orderly: bool = False) -> None:
        #: The other end said good-bye, or this end was closed by its own process; False after a crash.
        self.orderly = orderly
        super().__init__(message)


class ResourceExhausted(HetpipeError):
    """A stated limit is reached (message size, watchers, memory)."""


class Busy(ResourceExhausted):
    """The server does as much for this peer as it may at a time, and has done nothing; ask again soon."""


class DurabilityLost(ResourceExhausted):
    """A disk no longer takes what was to be kept; the process goes on, and would not survive its own end."""


class HistoryIncomplete(ResourceExhausted):
    """A disk no longer takes a file by which a run is told; the run goes on, and cannot be checked to its end."""


class StateLost(HetpipeError):
    """What a process kept on its disk is gone, damaged, or of another job; it cannot go on from there."""


class PortInUse(ResourceExhausted):
    """The address to listen on is taken."""


class CheckpointNotWritten(ResourceExhausted):
    """A checkpoint could not be written whole and was given up; the one before it stays."""


class Unauthenticated(HetpipeError):
    """A peer did not prove who it is, or did not accept this process's proof; the message says why."""


class PermissionDenied(HetpipeError):
    """The peer has proved who it is, and may not make this call, or not in another's name."""


class StoreUnavailable(Unavailable):
    """The coordinator's store (Redis) cannot be reached."""


class StoreDamaged(HetpipeError):
    """The coordinator's store holds a number that leaves no room for the next; `hetpipe repair store` repairs it."""


class NotLeader(Unavailable):
    """This coordinator does not lead, or no longer; another one acts."""


class InjectedFault(HetpipeError):
    """A test asked for this failure (`hetpipe.failpoints`)."""


class NobodyLeads(HetpipeError):
    """A coordinator answers, but for minutes it has told nothing of a job; whether the job goes on is not known."""


class JobFailed(HetpipeError):
    """A run ended before it was finished; the message is one sentence that names who died or failed and why."""
