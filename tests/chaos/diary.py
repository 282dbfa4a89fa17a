"""What is known for sure is kept in a file as soon as it is, so that whoever was interrupted goes on from there."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic

from tests.chaos.outcome import CaseT, Outcome, Tally, outcome_to_json

#: In the folder of a command.
_NAME = "outcomes.jsonl"


class Diary(Generic[CaseT]):
    """The outcomes of a folder, and what the judges have found there. Thread-safe."""

    def __init__(self, folder: Path, cases: Mapping[str, CaseT]) -> None:
        """Read what is there.

        Args:
            folder: made where it is missing.
            cases: by name; outcomes of others are left out.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / _NAME
        self._lock = threading.Lock()
        self._cases = cases
        #: By name of the case.
        self.outcomes: dict[str, Outcome] = {}
        self.tally = Tally()
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            self._take(json.loads(line))

    def note(self, outcomes: Sequence[Outcome], tally: Tally) -> None:
        """Enter what a job has shown."""
        with self._lock, self._path.open("a") as file:
            file.writelines(json.dumps(outcome_to_json(each)) + "\n" for each in outcomes)
            file.write(json.dumps(asdict(tally)) + "\n")
            self.outcomes |= {each.case.name: each for each in outcomes}
            self.tally += tally

    def _take(self, line: dict[str, Any]) -> None:
        if "case" not in line:
            self.tally += Tally(**line)
        elif line["case"] in self._cases:
            name = line.pop("case")
            self.outcomes[name] = Outcome(case=self._cases[name], **line)
