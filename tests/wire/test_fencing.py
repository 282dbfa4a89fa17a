"""Which coordinator may act."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hetpipe.errors import ProtocolViolation, StaleTerm
from hetpipe.wire.fencing import FENCE_KEY, FenceGuard, fence_metadata, fence_of


def call(*metadata: tuple[str, str]) -> Any:
    """The context of a call with this metadata."""
    return SimpleNamespace(invocation_metadata=lambda: metadata)


def test_whoever_has_seen_a_later_one_refuses_an_earlier_one() -> None:
    kept: list[int] = []
    guard = FenceGuard(3, keep=kept.append)
    guard.check(3)
    with pytest.raises(StaleTerm, match="its fence is 2, and a coordinator with fence 3 has acted"):
        guard.check(2)
    guard.check(7)
    with pytest.raises(StaleTerm):
        guard.check(3)
    assert (guard.highest, kept) == (7, [7])


def test_what_cannot_be_kept_is_not_seen() -> None:
    def keep(_: int) -> None:
        raise OSError

    guard = FenceGuard(keep=keep)
    with pytest.raises(OSError):  # noqa: PT011 - the bare class is what is raised
        guard.check(1)
    assert guard.highest == 0


def test_the_number_travels_as_metadata() -> None:
    numbers = iter((1, 2))
    metadata = fence_metadata(lambda: next(numbers))
    assert [fence_of(call(*metadata())) for _ in range(2)] == [1, 2]
    assert fence_of(call(("other", "9"))) == 0


@pytest.mark.parametrize("text", ["", "-1", "1.5", "x", "1" * 19, "\u0661", " 1"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(ProtocolViolation, match=FENCE_KEY):
        fence_of(call((FENCE_KEY, text)))
