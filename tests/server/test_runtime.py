"""What all services do around their work, without starting one."""

from __future__ import annotations

import threading

import pytest

from hetpipe.errors import PeerUnreachable
from hetpipe.server.runtime import Shutdown, started


class Asked(Shutdown):
    """Somebody asks for the end, or nobody does; no signals are heard."""

    def __init__(self) -> None:
        self.requested = threading.Event()


def test_who_is_told_to_end_while_it_waits_for_others_has_not_failed() -> None:
    shutdown = Asked()

    def give_up() -> None:
        shutdown.requested.set()
        raise PeerUnreachable("nobody was there yet")

    assert not started(give_up, shutdown)
    assert started(lambda: None, Asked())


def test_a_start_that_fails_by_itself_is_an_error() -> None:
    def fail() -> None:
        raise PeerUnreachable("nobody is there")

    with pytest.raises(PeerUnreachable, match="nobody is there"):
        started(fail, Asked())
