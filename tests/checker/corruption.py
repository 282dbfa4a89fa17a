"""What the corrupted histories are made with: an edit of a clean history, and the lines that it looks for.

A corruption finds its line by what the line says, so that it survives another seed. `kinds` is everything the checker
must report: the edit's own kind first, then what inevitably follows from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetpipe.checker import Kind
from tests.checker.scenario import Record, Scenario
from tests.checker.simulator import Histories

CLOCK_SHARD = "parameter_server-0.jsonl"
OTHER_SHARD = "parameter_server-1.jsonl"
FIRST_STAGE = "stage-0-0-0.jsonl"
LAST_STAGE = "stage-0-0-1.jsonl"

Edit = Callable[[Histories], None]


@dataclass(frozen=True, slots=True)
class Corruption:
    """An edit of the clean history of a scenario and what it must be reported as."""

    name: str
    kinds: tuple[Kind, ...]
    edit: Edit
    scenario: Scenario
    shipped: bool
    """Its files are committed under `corrupted/`."""


def register(
    corruptions: dict[str, Corruption], scenario: Scenario, *kinds: Kind, shipped: bool = False
) -> Callable[[Edit], Edit]:
    """A decorator that enters an edit under its name."""

    def enter(edit: Edit) -> Edit:
        name = edit.__name__
        corruptions[name] = Corruption(name, kinds, edit, scenario, shipped)
        return edit

    return enter


def all_of(histories: Histories, file: str, **fields: object) -> list[int]:
    """Positions of the lines of `file` that have these fields."""
    return [
        position
        for position, line in enumerate(histories[file])
        if all(line.get(key) == value for key, value in fields.items())
    ]


def find(histories: Histories, file: str, **fields: object) -> int:
    """The position of the first such line."""
    return all_of(histories, file, **fields)[0]


def record(histories: Histories, file: str, **fields: object) -> Record:
    """The first such line."""
    return histories[file][find(histories, file, **fields)]


def remove(histories: Histories, file: str, **fields: object) -> Record:
    """Take the first such line away."""
    return histories[file].pop(find(histories, file, **fields))


def move(histories: Histories, file: str, position: int, to: int) -> None:
    """Move the line at `position` to stand before the one now at `to`."""
    records = histories[file]
    line = records.pop(position)
    records.insert(to - (position < to), line)
