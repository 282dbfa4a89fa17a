"""Errors cross the wire as what they are."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from hetpipe import errors
from hetpipe.errors import HetpipeError, JobError
from hetpipe.wire import status
from hetpipe.wire.status import STATUS_BY_ERROR, error_from_name, metadata_of, status_of, text_of, translate_rpc_error
from tests.wire.failed_call import FailedCall


def all_errors(kind: type[HetpipeError] = HetpipeError) -> Iterator[type[HetpipeError]]:
    yield kind
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from all_errors(below)


def translated(error: grpc.RpcError) -> HetpipeError:
    return translate_rpc_error(
        error, peer="h:1", role="coordinator", call="Register", elapsed_seconds=1.25, awaited="a lease"
    )


def test_the_table_has_every_error() -> None:
    assert set(STATUS_BY_ERROR) == set(all_errors())


@pytest.mark.parametrize("kind", STATUS_BY_ERROR)
def test_every_error_comes_back_as_itself(kind: type[HetpipeError]) -> None:
    sent = kind("it does not fit")

    received = translated(FailedCall(status_of(sent), text_of(sent), metadata_of(sent)))

    assert type(received) is kind
    assert str(received) == "it does not fit"


def test_all_problems_of_a_job_come_back() -> None:
    sent = JobError(["epochs: must be positive", "sync.D: größer als 0"])

    received = translated(FailedCall(status_of(sent), text_of(sent), metadata_of(sent)))

    assert isinstance(received, JobError)
    assert received.problems == sent.problems


def test_a_flood_of_problems_is_cut_to_what_fits() -> None:
    sent = JobError([f"key{index}: unknown" for index in range(1_000)])

    metadata = dict(metadata_of(sent))
    assert len(metadata[status.PROBLEMS_KEY]) <= status.MAX_PROBLEMS_BYTES
    assert len(text_of(sent).encode()) <= status.MAX_TEXT_BYTES + 3
    received = translated(FailedCall(status_of(sent), text_of(sent), metadata_of(sent)))
    assert isinstance(received, JobError)
    assert received.problems[0] == "key0: unknown"
    assert received.problems[-1].startswith("and ")
    assert len(received.problems) - 1 + int(received.problems[-1].split()[1]) == 1_000


def test_a_subclass_the_table_does_not_have_travels_as_its_parent() -> None:
    class Special(errors.StaleTerm):
        """Not in the tree."""

    assert status_of(Special("old")) is STATUS_BY_ERROR[errors.StaleTerm]
    assert dict(metadata_of(Special("old")))[status.ERROR_KEY] == "StaleTerm"


def test_a_class_of_a_newer_version_becomes_the_base() -> None:
    assert type(error_from_name("InventedLater", "x")) is HetpipeError


def test_damaged_metadata_do_not_hurt() -> None:
    call = FailedCall(
        grpc.StatusCode.INVALID_ARGUMENT, "bad", ((status.ERROR_KEY, "JobError"), (status.PROBLEMS_KEY, b"\xff"))
    )

    received = translated(call)

    assert isinstance(received, JobError)
    assert received.problems == ("bad",)


@pytest.mark.parametrize(
    ("code", "kind", "sentence"),
    [
        (
            grpc.StatusCode.DEADLINE_EXCEEDED,
            errors.DeadlineExceeded,
            "coordinator at h:1 did not answer in time: Register waited 1.2 s for a lease",
        ),
        (
            grpc.StatusCode.UNAVAILABLE,
            errors.PeerUnreachable,
            "coordinator at h:1 cannot be reached: Register waited 1.2 s for a lease (details)",
        ),
        (grpc.StatusCode.CANCELLED, errors.PeerUnreachable, "coordinator at h:1 cannot be reached"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.ResourceExhausted, "coordinator at h:1 refused Register: details"),
        (grpc.StatusCode.UNIMPLEMENTED, errors.ProtocolViolation, "coordinator at h:1 does not implement Register"),
        (grpc.StatusCode.INTERNAL, HetpipeError, "coordinator at h:1 failed in Register after 1.2 s: details"),
    ],
)
def test_failures_of_grpc_itself_name_everything(
    code: grpc.StatusCode, kind: type[HetpipeError], sentence: str
) -> None:
    received = translated(FailedCall(code, "details"))

    assert type(received) is kind
    assert str(received).startswith(sentence)


def test_a_server_with_too_many_calls_is_busy() -> None:
    """It has done nothing yet, so asking again is right."""
    received = translated(FailedCall(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!"))
    assert type(received) is errors.Busy


def test_an_error_that_is_no_call_is_still_typed() -> None:
    assert type(translated(grpc.RpcError("strange"))) is HetpipeError
