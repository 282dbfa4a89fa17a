"""Which failures followed from lost safety, and which condition is the first cause."""

from __future__ import annotations

import pytest

from hetpipe.values.conditions import Condition, ConditionKind, consequence, first_cause

FULL = Condition(ConditionKind.DISK_NEARLY_FULL, "the disk at /runs", "the disk at /runs is nearly full", 5.0, times=1)
GIVEN_UP = Condition(ConditionKind.CHECKPOINT_GIVEN_UP, "checkpoints", "the checkpoint at clock 42 was given up", 7.0)
CUT = Condition(ConditionKind.HISTORY_INCOMPLETE, "parameter server 0", "the history ends here", 1.0)
AWAY = Condition(ConditionKind.STORE_UNREACHABLE, "Redis", "Redis is away", 2.0)
OVER = Condition(ConditionKind.CHECKPOINT_GIVEN_UP, "checkpoints", "clock 3 was given up", 0.5, cleared=0.9, times=1)


def test_the_first_one_that_holds_is_the_cause() -> None:
    assert first_cause([GIVEN_UP, OVER, FULL]) is FULL
    assert first_cause([OVER]) is None


@pytest.mark.parametrize(
    ("error", "sentence", "cause"),
    [
        ("CheckpointNotWritten", "the checkpoint at clock 400 was given up", FULL),
        ("StateLost", "parameter server 0 has lost its state of the job", FULL),
        ("OSError", "stage 0 failed: OSError: [Errno 28] No space left on device", FULL),
        ("StoreUnavailable", "no term could be taken", AWAY),
        ("JobFailed", "stage 0 of virtual worker 1 was killed by SIGKILL", None),
        ("CallableError", "model: there is no module `nope`", None),
    ],
)
def test_only_what_followed_from_it_names_it(error: str, sentence: str, cause: Condition | None) -> None:
    told = consequence(sentence, error, [CUT, AWAY, FULL, GIVEN_UP])
    assert told == (sentence if cause is None else f"{sentence}; first cause: {cause.sentence}")


def test_what_is_over_is_no_cause() -> None:
    assert consequence("it was given up", "CheckpointNotWritten", [OVER]) == "it was given up"


def test_a_history_that_was_cut_long_ago_is_one_only_if_nothing_else_is() -> None:
    full = "[Errno 28] No space left on device"
    assert consequence(full, "OSError", [CUT, GIVEN_UP]).endswith(GIVEN_UP.sentence)
    assert consequence(full, "OSError", [CUT]).endswith(CUT.sentence)
    assert consequence("it is torn", "StateLost", [CUT]) == "it is torn"


def test_it_is_named_once() -> None:
    once = consequence("no room", "CheckpointNotWritten", [FULL])
    assert consequence(once, "CheckpointNotWritten", [FULL, GIVEN_UP]) == once
