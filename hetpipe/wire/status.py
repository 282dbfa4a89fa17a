"""Errors on the wire: one table from error class to gRPC status, shared by servers and clients.

A server answers a `HetpipeError` with the status of its class, its message as status text, and the class name in the
trailing metadata; the client rebuilds the same class from that name. Any other exception of a handler is a bug: the
peer gets a status INTERNAL with a fixed text, and the log gets the details.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import grpc

from hetpipe import __version__, errors
from hetpipe.errors import HetpipeError, JobError
from hetpipe.wire.grpc_internals import TOO_MANY_CALLS

#: Trailing metadata key that carries the class name.
ERROR_KEY = "hetpipe-error"

#: Trailing metadata key that carries the problems of a `JobError`, as UTF-8 JSON.
PROBLEMS_KEY = "hetpipe-problems-bin"

#: Status text sent to the peer for an unexpected exception.
INTERNAL_TEXT = "internal error, see log"

#: Maximum length of the status text and of the list of problems, as UTF-8: gRPC drops a call whose trailing metadata
#: exceed 8 KiB; percent-encoding makes up to three bytes of one, base64 four of three.
MAX_TEXT_BYTES = 1_000
MAX_PROBLEMS_BYTES = 3_500

STATUS_BY_ERROR: dict[type[HetpipeError], grpc.StatusCode] = {
    errors.HetpipeError: grpc.StatusCode.UNKNOWN,
    errors.UserError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.JobError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.DocumentError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.CallableError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PlanError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.InfeasiblePlan: grpc.StatusCode.INVALID_ARGUMENT,
    errors.CheckpointError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ProtocolViolation: grpc.StatusCode.INVALID_ARGUMENT,
    errors.StaleTerm: grpc.StatusCode.FAILED_PRECONDITION,
    errors.StaleIncarnation: grpc.StatusCode.FAILED_PRECONDITION,
    errors.WaveOutOfOrder: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SliceMismatch: grpc.StatusCode.INVALID_ARGUMENT,
    errors.MalformedChunk: grpc.StatusCode.INVALID_ARGUMENT,
    errors.MalformedFrame: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NonFiniteUpdate: grpc.StatusCode.INVALID_ARGUMENT,
    errors.UnknownJob: grpc.StatusCode.NOT_FOUND,
    errors.ClockNotPublished: grpc.StatusCode.FAILED_PRECONDITION,
    errors.BuffersMissing: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ClockFreed: grpc.StatusCode.OUT_OF_RANGE,
    errors.UnknownMember: grpc.StatusCode.NOT_FOUND,
    errors.MemberReplaced: grpc.StatusCode.FAILED_PRECONDITION,
    errors.VersionConflict: grpc.StatusCode.ABORTED,
    errors.InvalidTransition: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.PeerUnreachable: grpc.StatusCode.UNAVAILABLE,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.DamagedChunk: grpc.StatusCode.DATA_LOSS,
    errors.LinkClosed: grpc.StatusCode.UNAVAILABLE,
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.CheckpointNotWritten: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Busy: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DurabilityLost: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DataWorkerLost: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.HistoryIncomplete: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.StateLost: grpc.StatusCode.DATA_LOSS,
    errors.PortInUse: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.StoreUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.StoreDamaged: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotLeader: grpc.StatusCode.UNAVAILABLE,
    errors.InjectedFault: grpc.StatusCode.UNKNOWN,
    errors.NobodyLeads: grpc.StatusCode.ABORTED,
    errors.JobFailed: grpc.StatusCode.ABORTED,
    errors.ScriptFailed: grpc.StatusCode.ABORTED,
}

_ERROR_BY_NAME: dict[str, type[HetpipeError]] = {kind.__name__: kind for kind in STATUS_BY_ERROR}

Metadata = tuple[tuple[str, str | bytes], ...]


def error_from_name(name: str, sentence: str, problems: Iterable[str] = ()) -> HetpipeError:
    """The error of class `name` with message `sentence`; a plain `HetpipeError` for a class unknown to this version."""
    kind = _ERROR_BY_NAME.get(name, HetpipeError)
    if issubclass(kind, JobError):
        return kind(tuple(problems) or sentence)
    return kind(sentence)


def status_of(error: HetpipeError) -> grpc.StatusCode:
    """The status of the nearest class in the table."""
    return next(STATUS_BY_ERROR[kind] for kind in type(error).__mro__ if kind in STATUS_BY_ERROR)


def text_of(error: HetpipeError) -> str:
    """The error message, truncated to fit into a status."""
    text = str(error)
    raw = text.encode(errors="replace")
    return text if len(raw) <= MAX_TEXT_BYTES else raw[:MAX_TEXT_BYTES].decode(errors="ignore") + "…"


def metadata_of(error: HetpipeError) -> Metadata:
    """Trailing metadata from which `error_from_status` rebuilds the class."""
    name = next(kind.__name__ for kind in type(error).__mro__ if kind in STATUS_BY_ERROR)
    metadata: Metadata = ((ERROR_KEY, name),)
    if isinstance(error, JobError):
        metadata += ((PROBLEMS_KEY, _encode_problems(error.problems)),)
    return metadata


def translate_rpc_error(
    error: grpc.RpcError, *, peer: str, role: str, call: str, elapsed_seconds: float, awaited: str = "an answer"
) -> HetpipeError:
    """Translate a gRPC error into a typed one.

    Args:
        error: the error raised by gRPC.
        peer: address of the server.
        role: the server's role, for example `coordinator`.
        call: name of the call.
        elapsed_seconds: time since the start of the call.
        awaited: what the caller waited for; completes the sentence "… waited for".

    Returns:
        The server's own error, if it was a `HetpipeError`; else `PeerUnreachable`, `DeadlineExceeded` or another error
        whose message names peer, role, call, elapsed time and what was awaited.
    """
    rebuilt = _error_from_status(error)
    if rebuilt is not None:
        return rebuilt
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    details = (error.details() if isinstance(error, grpc.Call) else str(error)) or "no details"
    where = f"{role} at {peer}"
    story = f"{call} waited {elapsed_seconds:.1f} s for {awaited}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded(f"{where} did not answer in time: {story}")
    if code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}:
        return errors.PeerUnreachable(f"{where} cannot be reached: {story} ({details})")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        kind = errors.Busy if details == TOO_MANY_CALLS else errors.ResourceExhausted
        return kind(f"{where} refused {call}: {details}")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return errors.ProtocolViolation(
            f"{where} does not implement {call}; it may be another program or another version ({details}); this is "
            f"hetpipe {__version__}"
        )
    return HetpipeError(f"{where} failed in {call} after {elapsed_seconds:.1f} s: {details}")


def _encode_problems(problems: tuple[str, ...]) -> bytes:
    kept: list[str] = []
    for index, problem in enumerate(problems):
        rest = f"and {len(problems) - index} more"
        if len(json.dumps([*kept, problem, rest], ensure_ascii=False).encode()) > MAX_PROBLEMS_BYTES:
            kept.append(rest)
            break
        kept.append(problem)
    return json.dumps(kept, ensure_ascii=False).encode()


def _decode_problems(raw: object) -> tuple[str, ...]:
    try:
        values = json.loads(raw) if isinstance(raw, bytes) else []
    except (ValueError, RecursionError):
        return ()
    return tuple(value for value in values if isinstance(value, str)) if isinstance(values, list) else ()


def _error_from_status(error: grpc.RpcError) -> HetpipeError | None:
    if not isinstance(error, grpc.Call):
        return None
    trailing: dict[str, object] = dict(error.trailing_metadata() or ())
    name = trailing.get(ERROR_KEY)
    if not isinstance(name, str):
        return None
    return error_from_name(name, error.details() or name, _decode_problems(trailing.get(PROBLEMS_KEY)))
