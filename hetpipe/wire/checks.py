"""Are the names and numbers of a message ones that can be? Asked where messages become values (`rpc.convert`)."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from hetpipe.errors import ProtocolViolation
from hetpipe.proto.v1 import coordinator_pb2 as pb
from hetpipe.values.addresses import split_address
from hetpipe.values.bounds import JOB_ID, MAX_COUNT, MAX_PATH_CHARACTERS, MAX_SHARDS, MAX_STAGES
from hetpipe.values.ids import JobId

#: Members are called by host names, addresses, and what people call their nodes.
_MEMBER_ID = re.compile(r"[0-9A-Za-z._:\[\]-]{1,255}", re.ASCII)
_HOST = re.compile(r"[0-9A-Za-z._:%-]{1,255}", re.ASCII)

#: `NODE/INDEX`, what the driver calls it, and what PyTorch calls it.
_DEVICE = re.compile(r"[0-9A-Za-z._:\[\]-]{1,255}/\d{1,4}", re.ASCII)
_DEVICE_TYPE = re.compile(r"[ -~]{1,200}")
_TORCH_DEVICE = re.compile(r"cpu|cuda:\d{1,4}", re.ASCII)


def checked_job_id(text: str) -> JobId:
    """`text` as the id of a job.

    Raises:
        ProtocolViolation: no job could be called that.
    """
    if not JOB_ID.fullmatch(text):
        raise ProtocolViolation(f"{text!r:.80} names no job: letters, digits, dots, dashes and _, 128 at most")
    return JobId(text)


def check_counts(whose: str, *counts: int) -> None:
    """Refuse what nobody counts to.

    Raises:
        ProtocolViolation: one of them is too large.
    """
    if max(counts, default=0) >= MAX_COUNT:
        raise ProtocolViolation(f"{whose}: {max(counts)} is no count; they stay below {MAX_COUNT}")


def check_folder(text: str) -> None:
    """Refuse what is no folder on any machine.

    Raises:
        ProtocolViolation: it is not absolute, too long, or has characters that nobody types.
    """
    if len(text) > MAX_PATH_CHARACTERS or not text.isprintable() or not PurePosixPath(text).is_absolute():
        raise ProtocolViolation(f"{text!r:.80} is no folder; write an absolute path of printable characters")


def check_member(message: pb.MemberInfo) -> None:
    """Refuse what no process could tell of itself.

    Raises:
        ProtocolViolation, UserError: a name, an address or a number that cannot be.
    """
    if not _MEMBER_ID.fullmatch(message.id):
        raise ProtocolViolation(f"{message.id!r:.80} names no member: letters, digits, . _ : [ ] and -, 255 at most")
    if not _HOST.fullmatch(message.host):
        raise ProtocolViolation(f"member {message.id} cannot be on a host called {message.host!r:.80}")
    if message.address:
        split_address(message.address)
    if message.shard_index >= MAX_SHARDS:
        raise ProtocolViolation(f"member {message.id} wants to be shard {message.shard_index} of at most {MAX_SHARDS}")
    if len(message.devices) > MAX_STAGES:
        raise ProtocolViolation(f"member {message.id} offers {len(message.devices)} devices; at most {MAX_STAGES}")
    if len(message.stages) > MAX_STAGES:
        raise ProtocolViolation(f"member {message.id} has {len(message.stages)} stages; at most {MAX_STAGES}")
    memory = (device.memory_bytes for device in message.devices)
    check_counts(f"member {message.id}", message.highest_term, message.highest_fence, *memory)
    for device in message.devices:
        _check_device(device)


def _check_device(message: pb.Device) -> None:
    named = _DEVICE.fullmatch(message.device) and _DEVICE_TYPE.fullmatch(message.type)
    if not named or not _TORCH_DEVICE.fullmatch(message.torch_device):
        raise ProtocolViolation(
            f"{message.device!r:.80} of type {message.type!r:.80} ({message.torch_device!r:.40}) is no device; "
            "it is NODE/INDEX, of a printable type, and `cpu` or `cuda:INDEX`"
        )
