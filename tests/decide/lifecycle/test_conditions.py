"""What followers are told of a run's safety, and what is known of it."""

from __future__ import annotations

from dataclasses import replace

from hetpipe.decide.lifecycle.conditions import BURST, GATHER_SECONDS, MAX_KEPT, WINDOW_SECONDS, ConditionBoard
from hetpipe.values.conditions import Condition, ConditionKind
from hetpipe.values.events import ConditionCleared, ConditionRaised, NumberedEvent

KIND = ConditionKind.DURABILITY_LOST


def raised(who: str = "parameter server 0", *, times: int = 1, kind: ConditionKind = KIND) -> Condition:
    return Condition(kind, who, f"the disk of {who} is full", since=100.0 + times, times=times)


def cleared(who: str = "parameter server 0", *, times: int = 1, kind: ConditionKind = KIND) -> Condition:
    return replace(raised(who, times=times, kind=kind), cleared=150.0, clearance=f"{who} writes again")


class Board:
    """A board, and all that it has told."""

    def __init__(self) -> None:
        self.board = ConditionBoard()
        self.told: list[ConditionRaised | ConditionCleared] = []

    def hear(self, *conditions: Condition, source: str = "ps0", at: float = 0.0) -> list[str]:
        """What is told then, by kind of event."""
        self.board.take(source, conditions)
        return self.wait(at)

    def wait(self, at: float) -> list[str]:
        found = self.board.due(now=at)
        self.told += found
        return [event.kind for event in found]


class TestWhatIsTold:
    def test_the_first_one_is_told_at_once_and_so_is_that_it_is_over(self) -> None:
        board = Board()
        assert board.hear(raised(), at=10.0) == ["condition_raised"]
        assert board.hear(raised(), at=10.2) == []
        assert board.hear(cleared(), at=30.0) == ["condition_cleared"]
        assert board.told == [
            ConditionRaised(KIND, ("parameter server 0",), "the disk of parameter server 0 is full", 101.0, 1),
            ConditionCleared(KIND, ("parameter server 0",), "parameter server 0 writes again", 150.0, 0),
        ]

    def test_what_is_well_from_the_beginning_is_no_news(self) -> None:
        board = Board()
        assert board.hear(Condition(KIND, "parameter server 0", cleared=1.0)) == []
        assert board.board.all == ()

    def test_more_of_the_same_share_a_line(self) -> None:
        board = Board()
        board.hear(raised("parameter server 0"), at=0.0)
        for number in range(1, 6):
            assert board.hear(raised(f"parameter server {number}"), source=f"ps{number}", at=0.1 * number) == []
        assert board.board.current[KIND] == 6, "what is current is known at any time"
        assert board.wait(GATHER_SECONDS) == ["condition_raised"]
        assert board.told[-1].who == tuple(f"parameter server {number}" for number in range(1, 6))

    def test_other_kinds_do_not_wait(self) -> None:
        board = Board()
        board.hear(raised(), at=0.0)
        assert board.hear(raised(kind=ConditionKind.CHECKPOINT_GIVEN_UP), at=0.1) == ["condition_raised"]

    def test_that_it_is_over_for_one_says_for_how_many_it_is_not(self) -> None:
        board = Board()
        board.hear(raised("parameter server 0"), raised("parameter server 1"))
        board.hear(cleared("parameter server 0"), at=10.0)
        over = board.told[-1]
        assert isinstance(over, ConditionCleared)
        assert (over.who, over.remaining) == (("parameter server 0",), 1)

    def test_one_that_was_over_before_it_was_heard_of_is_told_with_its_end(self) -> None:
        assert Board().hear(cleared()) == ["condition_raised", "condition_cleared"]

    def test_one_that_is_raised_again_while_it_holds_is_counted_and_not_told(self) -> None:
        board = Board()
        board.hear(raised(), at=0.0)
        assert board.hear(replace(raised(times=5), since=101.0), at=10.0) == []
        assert [one.times for one in board.board.all] == [5]

    def test_a_disk_that_flaps_does_not_flood_the_screen(self) -> None:
        board, seconds = Board(), 600
        for tick in range(10 * seconds):
            flap = raised(times=1 + tick // 2) if tick % 2 == 0 else cleared(times=1 + tick // 2)
            board.hear(flap, at=tick / 10)
        board.wait(float(2 * seconds))
        groups = BURST * (1 + seconds / WINDOW_SECONDS)
        assert len(board.told) <= 2 * groups + 2
        counted = sum(event.times for event in board.told if isinstance(event, ConditionRaised))
        assert counted == 5 * seconds, "and none is lost: they are counted"
        assert isinstance(board.told[-1], ConditionCleared)


class TestWhatIsKnown:
    def test_a_process_that_was_started_again_counts_anew(self) -> None:
        board = Board()
        board.hear(raised(times=3), at=0.0)
        board.hear(cleared(times=3), at=10.0)
        board.hear(raised(times=1), at=20.0)
        assert [event.kind for event in board.told] == ["condition_raised", "condition_cleared", "condition_raised"]
        assert [one.times for one in board.board.all] == [4]

    def test_a_disk_that_two_processes_look_at_is_full_until_both_say_that_it_is_not(self) -> None:
        board = Board()
        board.hear(raised("the disk of /runs"), source="ps0")
        assert board.hear(replace(raised("the disk of /runs"), since=102.0), source="ps1", at=9.0) == []
        assert board.hear(cleared("the disk of /runs"), source="ps1", at=10.0) == []
        assert board.hear(cleared("the disk of /runs"), source="ps0", at=20.0) == ["condition_cleared"]

    def test_a_history_that_lacks_lines_stays_so(self) -> None:
        board = Board()
        board.hear(raised(kind=ConditionKind.HISTORY_INCOMPLETE), at=0.0)
        assert board.hear(cleared(kind=ConditionKind.HISTORY_INCOMPLETE), at=10.0) == []
        assert board.board.current[ConditionKind.HISTORY_INCOMPLETE] == 1

    def test_who_says_nothing_of_it_leaves_it_as_it_was(self) -> None:
        board = Board()
        board.hear(raised())
        assert board.hear(at=10.0) == []
        assert board.board.current[KIND] == 1

    def test_a_peer_that_makes_names_up_does_not_fill_the_memory(self) -> None:
        board = Board()
        for number in range(3 * MAX_KEPT):
            board.hear(raised(f"made up {number}"), at=float(number))
        assert len(board.board.all) == MAX_KEPT


class TestAnotherCoordinator:
    """It has the events that the one before has told."""

    @staticmethod
    def after(board: Board) -> Board:
        successor = Board()
        successor.board.recall([NumberedEvent(number, event) for number, event in enumerate(board.told, 1)])
        return successor

    def test_followers_hear_nothing_twice(self) -> None:
        first = Board()
        first.hear(raised("parameter server 0"), cleared("parameter server 1"), at=0.0)
        second = self.after(first)
        assert second.board.current[KIND] == 1
        assert second.hear(raised("parameter server 0"), cleared("parameter server 1"), at=50.0) == []

    def test_what_ended_while_there_was_none_is_told(self) -> None:
        first = Board()
        first.hear(raised(), at=0.0)
        second = self.after(first)
        assert second.hear(cleared(), at=50.0) == ["condition_cleared"]

    def test_what_began_while_there_was_none_is_told(self) -> None:
        first = Board()
        first.hear(raised(times=1), at=0.0)
        first.hear(cleared(times=1), at=10.0)
        second = self.after(first)
        assert second.hear(raised(times=2), at=50.0) == ["condition_raised"]

    def test_without_any_events_it_hears_of_it_from_who_raised_it(self) -> None:
        assert Board().hear(raised(times=7), at=50.0) == ["condition_raised"]
