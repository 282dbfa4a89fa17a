"""The numbers of docs/limits.md are those of the code."""

from __future__ import annotations

import re

from hetpipe.decide.lifecycle.registry import MAX_MEMBERS, MAX_WORKERS_OF_OWNER
from hetpipe.decide.sync.shard_state import MAX_WAVES_AHEAD
from hetpipe.job.as_json import MAX_JOB_CHARACTERS, MAX_JOB_VALUES
from hetpipe.server.coordinator.job_hosts import MAX_ENDED_JOBS, MAX_OPEN_JOBS, MAX_OPEN_JOBS_OF_OWNER
from hetpipe.server.coordinator.servicer import CONCURRENT_CALLS as CONCURRENT_CALLS_OF_COORDINATOR
from hetpipe.server.coordinator.servicer import (
    MAX_AGENT_STREAMS,
    MAX_MONITOR_STREAMS,
    MAX_STREAMS_OF_VIEWER,
    MAX_VIEWER_STREAMS,
    NUM_THREADS,
)
from hetpipe.server.shard.buffer_exchange import BufferExchange
from hetpipe.server.shard.main import CALL_THREADS, CONCURRENT_CALLS
from hetpipe.storage.store import MAX_EVENTS
from hetpipe.values import bounds
from hetpipe.values.counters import FENCES, MAX_REPORTED_AHEAD
from hetpipe.values.identity import Role
from hetpipe.values.members import MemberRole
from hetpipe.values.wire import MAX_ENTRIES
from hetpipe.values.yaml_text import MAX_VALUES
from hetpipe.wire.audit import (
    LINES_AT_ONCE,
    LINES_AT_ONCE_PER_PEER,
    LINES_PER_SECOND,
    LINES_PER_SECOND_PER_PEER,
    REFUSALS_AT_ONCE,
    REFUSALS_PER_SECOND,
    SUMMARY_SECONDS,
)
from hetpipe.wire.channel import HANDSHAKE_SECONDS, IDLE_CONNECTION_SECONDS, MAX_MESSAGE_BYTES
from hetpipe.wire.limits import SHARES, Limits, room_of
from hetpipe.wire.segment import IDLE_SECONDS, SEGMENT_BYTES
from hetpipe.wire.segment_server import MAX_SEGMENTS, TOKEN_SECONDS
from hetpipe.wire.server import MAX_CONCURRENT_CALLS, MAX_STREAMS_PER_CONNECTION
from hetpipe.wire.threads import MAX_WAITING_BYTES, THREADS_PER_READING
from hetpipe.wire.watchers import STREAM_SECONDS
from tests.docs.pages import ROOT

LIMITS = Limits()

#: In the order of the page.
IN_CODE: tuple[float | None, ...] = (
    MAX_MESSAGE_BYTES,
    MAX_CONCURRENT_CALLS,
    MAX_STREAMS_PER_CONNECTION,
    LIMITS.calls_per_peer,
    LIMITS.streams_per_peer,
    LIMITS.bytes_per_peer,
    THREADS_PER_READING,
    MAX_WAITING_BYTES,
    LIMITS.idle_seconds,
    LIMITS.upload_seconds,
    STREAM_SECONDS,
    HANDSHAKE_SECONDS,
    IDLE_CONNECTION_SECONDS,
    CALL_THREADS,
    CONCURRENT_CALLS,
    bounds.MAX_SHARDS,
    bounds.MAX_STAGES,
    BufferExchange.MAX_BYTES,
    BufferExchange.MAX_BUFFERS,
    MAX_WAVES_AHEAD,
    MAX_SEGMENTS,
    SEGMENT_BYTES,
    TOKEN_SECONDS,
    IDLE_SECONDS,
    NUM_THREADS,
    CONCURRENT_CALLS_OF_COORDINATOR,
    MAX_AGENT_STREAMS,
    MAX_VIEWER_STREAMS,
    MAX_STREAMS_OF_VIEWER,
    MAX_MONITOR_STREAMS,
    MAX_MEMBERS[MemberRole.AGENT],
    MAX_MEMBERS[MemberRole.PARAMETER_SERVER],
    MAX_MEMBERS[MemberRole.WORKER],
    MAX_WORKERS_OF_OWNER,
    MAX_OPEN_JOBS,
    MAX_OPEN_JOBS_OF_OWNER,
    MAX_ENDED_JOBS,
    MAX_EVENTS,
    FENCES.limit,
    MAX_REPORTED_AHEAD,
    MAX_JOB_CHARACTERS,
    MAX_JOB_VALUES,
    bounds.MAX_COUNT,
    bounds.MAX_SAMPLES,
    bounds.MAX_RANK,
    bounds.MAX_NAME_CHARACTERS,
    bounds.MAX_PATH_CHARACTERS,
    bounds.MAX_SENTENCE_CHARACTERS,
    MAX_ENTRIES,
    MAX_VALUES,
)


def test_the_page_has_the_numbers_of_the_code() -> None:
    page = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    told = [int(value.replace(",", "")) for value in re.findall(r"^\| .* \| ([\d,]+) \|$", page, re.MULTILINE)]
    assert told == list(IN_CODE)


def test_a_whole_run_on_one_machine_finds_its_threads() -> None:
    """Without TLS it is one peer; whoever follows the log of a parameter server occupies no thread."""
    assert (LIMITS.of_address(CALL_THREADS).calls_per_peer or 0) >= 64
    assert (LIMITS.of_address(NUM_THREADS).calls_per_peer or 0) >= MAX_VIEWER_STREAMS + 64


def test_the_page_tells_how_refusals_are_logged() -> None:
    page = " ".join((ROOT / "docs" / "limits.md").read_text(encoding="utf-8").split())
    assert f"a peer has {LINES_AT_ONCE_PER_PEER} such lines at once and one more per second" in page
    assert LINES_PER_SECOND_PER_PEER == 1.0
    assert f"all together have {LINES_AT_ONCE} and {LINES_PER_SECOND:g} per second" in page
    assert f"every {SUMMARY_SECONDS:g} s one line" in page
    assert f"refused {REFUSALS_AT_ONCE} times for missing permissions" in page
    assert f"below {REFUSALS_PER_SECOND:g} per second" in page


def test_no_role_takes_the_threads_that_agents_and_parameter_servers_need() -> None:
    people = sum(room_of(role, NUM_THREADS) or 0 for role in (Role.MONITOR, Role.OPERATOR))
    assert NUM_THREADS - people >= 112
    assert (room_of(Role.STAGE, CALL_THREADS) or 0) <= CALL_THREADS - 12
    assert SHARES.keys() == {Role.MONITOR, Role.OPERATOR, Role.STAGE}
    operators = room_of(Role.OPERATOR, NUM_THREADS) or 0
    assert operators >= MAX_VIEWER_STREAMS + 16, "who hands in a job finds a thread beside those who follow theirs"
