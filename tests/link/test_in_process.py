"""The in-process link keeps the contract of all links."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hetpipe.link.in_process import in_process_pair
from hetpipe.link.policy import Link, LinkLimits
from tests.support.link_contract import Connect, LinkContract


class TestInProcessLink(LinkContract):
    @pytest.fixture
    def connect(self) -> Iterator[Connect]:
        made: list[Link] = []

        def connect(limits: LinkLimits) -> tuple[Link, Link]:
            pair = in_process_pair("stage 0 of virtual worker 1", "stage 1 of virtual worker 1", limits=limits)
            made.extend(pair)
            return pair

        yield connect
        for link in made:
            link.close()


def test_limits_that_could_never_send_are_refused() -> None:
    for bad in ({"outgoing_frames": 0}, {"incoming_frames": 0}, {"frame_bytes": -1}):
        with pytest.raises(ValueError, match="link"):
            LinkLimits(**bad)
