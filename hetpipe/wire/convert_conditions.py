"""Conditions of jobs as messages and back, in pairs `x_to_proto` and `x_from_proto`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hetpipe.errors import ProtocolViolation
from hetpipe.proto.v1 import coordinator_pb2 as pb
from hetpipe.values.bounds import MAX_LISTED
from hetpipe.values.conditions import Condition, ConditionKind
from hetpipe.values.ids import JobId
from hetpipe.values.wire import revive
from hetpipe.wire.checks import checked_job_id


def kind_from_word(word: str) -> ConditionKind:
    """A kind of condition."""
    try:
        return ConditionKind(word)
    except ValueError:
        raise ProtocolViolation(f"condition {word!r:.40} is not known to this version") from None


def condition_to_proto(condition: Condition) -> pb.Condition:
    """One condition."""
    return pb.Condition(
        kind=condition.kind,
        who=condition.who,
        sentence=condition.sentence,
        since=condition.since,
        cleared=condition.cleared,
        clearance=condition.clearance,
        times=condition.times,
    )


def condition_from_proto(message: pb.Condition) -> Condition:
    """One condition."""
    plain = {
        "kind": kind_from_word(message.kind),
        "who": message.who,
        "sentence": message.sentence,
        "since": message.since,
        "cleared": message.cleared if message.HasField("cleared") else None,
        "clearance": message.clearance,
        "times": message.times,
    }
    condition: Condition = revive(Condition, plain)
    return condition


def job_conditions_to_proto(conditions: Mapping[JobId, Iterable[Condition]]) -> list[pb.JobCondition]:
    """Conditions by job."""
    return [
        pb.JobCondition(job_id=job_id, condition=condition_to_proto(condition))
        for job_id, found in conditions.items()
        for condition in found
    ]


def job_conditions_from_proto(messages: Iterable[pb.JobCondition]) -> dict[JobId, tuple[Condition, ...]]:
    """Conditions by job."""
    found: dict[JobId, list[Condition]] = {}
    for number, message in enumerate(messages):
        if number >= MAX_LISTED:
            raise ProtocolViolation(f"a member tells of more than {MAX_LISTED} conditions")
        found.setdefault(checked_job_id(message.job_id), []).append(condition_from_proto(message.condition))
    return {job_id: tuple(conditions) for job_id, conditions in found.items()}
