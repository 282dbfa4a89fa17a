"""Validation beyond types: plausibility of the names and numbers in values from a peer.

The codec applies it to every decoded value, at any depth of a message.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from hetpipe.code_archive import digest_of
from hetpipe.errors import ProtocolViolation
from hetpipe.values.addresses import split_address
from hetpipe.values.bounds import JOB_ID, MAX_COUNT, MAX_LISTED, MAX_PATH_CHARACTERS, MAX_SHARDS, MAX_STAGES, cut
from hetpipe.values.commands import (
    ChildExit,
    InspectionPhase,
    InspectionResult,
    InspectionStep,
    LinkAwaited,
    LinkResult,
    StageKey,
)
from hetpipe.values.events import Submission
from hetpipe.values.ids import JobId
from hetpipe.values.measurement import ProfileStep
from hetpipe.values.members import MemberInfo
from hetpipe.values.run import AgentDevice, ClockSnapshot
from hetpipe.values.storage_url import checked_url, is_url

#: Host names, addresses, and the names users give their nodes.
_MEMBER_ID = re.compile(r"[0-9A-Za-z._:\[\]-]{1,255}", re.ASCII)
_HOST = re.compile(r"[0-9A-Za-z._:%-]{1,255}", re.ASCII)

#: `NODE/INDEX`, the driver's name of the type, and PyTorch's name of the device.
_DEVICE = re.compile(r"[0-9A-Za-z._:\[\]-]{1,255}/\d{1,4}", re.ASCII)
_DEVICE_TYPE = re.compile(r"[ -~]{1,200}")
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_TORCH_DEVICE = re.compile(r"cpu|cuda:\d{1,4}", re.ASCII)


def checked_job_id(text: str) -> JobId:
    """`text` as the id of a job.

    Raises:
        ProtocolViolation: it is not a valid job id.
    """
    if not JOB_ID.fullmatch(text):
        raise ProtocolViolation(
            f"{text!r:.80} is not a job id; use at most 128 letters, digits, dots, dashes and underscores"
        )
    return JobId(text)


def check_counts(whose: str, *counts: int) -> None:
    """Check that counts are below `MAX_COUNT`.

    Raises:
        ProtocolViolation: one of them is not.
    """
    if max(counts, default=0) >= MAX_COUNT:
        raise ProtocolViolation(f"{whose}: {max(counts)} is not a valid count; counts must be below {MAX_COUNT}")


def check_folder(text: str) -> None:
    """Check that a path is absolute, of bounded length and printable.

    Raises:
        ProtocolViolation: it is relative, too long, or contains unprintable characters.
    """
    if len(text) > MAX_PATH_CHARACTERS or not text.isprintable() or not PurePosixPath(text).is_absolute():
        raise ProtocolViolation(f"{text!r:.80} is not a valid folder; use an absolute path of printable characters")


def check_digest(text: str) -> None:
    """Check that a text is a SHA-256 digest in hexadecimal.

    Raises:
        ProtocolViolation: it is not.
    """
    if not _DIGEST.fullmatch(text):
        raise ProtocolViolation(f"{text!r:.80} is not a digest; use the 64 hexadecimal digits of a SHA-256")


def check_submission(submission: Submission) -> None:
    """Check a submission from a client.

    Raises:
        ProtocolViolation: a part is missing or is not a folder, code does not have its digest, or it counts rewinds,
            which only a coordinator does.
    """
    if not submission.request_id or not submission.run_dir:
        raise ProtocolViolation("a submission needs a request id and the folder of the run")
    if submission.rewinds:
        raise ProtocolViolation(f"a submitted job cannot have been rewound {submission.rewinds} times")
    if submission.code is not None and digest_of(submission.code.archive) != submission.code.digest:
        raise ProtocolViolation("the code that is sent along with the job has another digest than the one named")
    for folder in (submission.run_dir, submission.import_path):
        check_folder(folder)
    if submission.restore and is_url(submission.restore):
        try:
            checked_url(submission.restore)
        except ValueError as error:
            raise ProtocolViolation(f"the checkpoint to resume from: {error}") from error
    else:
        check_folder(submission.restore or submission.run_dir)


def _member(info: MemberInfo) -> MemberInfo:
    if not _MEMBER_ID.fullmatch(info.id):
        raise ProtocolViolation(
            f"{info.id!r:.80} is not a member id; use at most 255 letters, digits and the characters . _ : [ ] -"
        )
    if not _HOST.fullmatch(info.host):
        raise ProtocolViolation(f"member {info.id}: {info.host!r:.80} is not a valid host name")
    if info.address:
        split_address(info.address)
    if info.shard_index is not None and info.shard_index >= MAX_SHARDS:
        raise ProtocolViolation(
            f"member {info.id} registers as shard {info.shard_index}; a job has at most {MAX_SHARDS} shards"
        )
    if len(info.devices) > MAX_STAGES:
        raise ProtocolViolation(f"member {info.id} offers {len(info.devices)} devices; at most {MAX_STAGES}")
    if len(info.stages) > MAX_STAGES:
        raise ProtocolViolation(f"member {info.id} has {len(info.stages)} stages; at most {MAX_STAGES}")
    memory = (device.memory_bytes for device in info.devices)
    check_counts(f"member {info.id}", info.highest_term, info.highest_fence, *memory)
    for device in info.devices:
        _check_device(device)
    return info


def _check_device(device: AgentDevice) -> None:
    named = _DEVICE.fullmatch(device.device) and _DEVICE_TYPE.fullmatch(device.type)
    if not named or not _TORCH_DEVICE.fullmatch(device.torch_device):
        raise ProtocolViolation(
            f"{device.device!r:.80} of type {device.type!r:.80} ({device.torch_device!r:.40}) is not a device; "
            "expected NODE/INDEX, a printable type, and `cpu` or `cuda:INDEX`"
        )


def _clocks(clocks: ClockSnapshot) -> ClockSnapshot:
    num_workers = max(len(clocks.local), len(clocks.staged), len(clocks.durable))
    if num_workers > MAX_STAGES:
        raise ProtocolViolation(f"clocks of {num_workers} virtual workers; at most {MAX_STAGES} are allowed")
    if len(clocks.applied) > MAX_SHARDS:
        raise ProtocolViolation(
            f"{len(clocks.applied)} shards with a failed disk; a job has at most {MAX_SHARDS} shards"
        )
    numbers = (clocks.term, clocks.published, clocks.global_clock, clocks.max_distance, clocks.epoch)
    counts = (clocks.minibatches, clocks.samples, clocks.barrier, clocks.waves)
    marks = (*clocks.local.values(), *clocks.staged.values(), *clocks.durable.values())
    check_counts("the clocks of a job", *numbers, *counts, *marks)
    return replace(clocks, barrier_reason=cut(clocks.barrier_reason))


def _stage_key(key: StageKey) -> StageKey:
    check_counts("the incarnation of a stage", key.incarnation, key.term)
    checked_job_id(key.job_id)
    return key


def _inspection(result: InspectionResult) -> InspectionResult:
    checked_job_id(result.job_id)
    problems = tuple(cut(problem) for problem in result.problems[:MAX_LISTED])
    return replace(result, error=cut(result.error), problems=problems)


def _inspection_step(report: InspectionStep) -> InspectionStep:
    checked_job_id(report.job_id)
    step = report.step
    return replace(report, step=ProfileStep(cut(step.device_type), cut(step.layer), step.done, step.total))


def _inspection_phase(report: InspectionPhase) -> InspectionPhase:
    checked_job_id(report.job_id)
    return replace(report, phase=cut(report.phase))


def _link_awaited(report: LinkAwaited) -> LinkAwaited:
    checked_job_id(report.job_id)
    split_address(report.address)
    return report


def _link_result(report: LinkResult) -> LinkResult:
    checked_job_id(report.job_id)
    return replace(report, problem=cut(report.problem))


def _child_exit(report: ChildExit) -> ChildExit:
    return replace(report, last_output=cut(report.last_output))


#: Class → validator, which returns the value with its sentences truncated.
CHECKS: Mapping[type, Callable[[Any], Any]] = {
    MemberInfo: _member,
    ClockSnapshot: _clocks,
    StageKey: _stage_key,
    InspectionResult: _inspection,
    InspectionStep: _inspection_step,
    InspectionPhase: _inspection_phase,
    LinkAwaited: _link_awaited,
    LinkResult: _link_result,
    ChildExit: _child_exit,
}
