"""A pytest plugin that injects a seeded bug: `SEEDED_BUG=NAME pytest -p tests.simulation.seeded FILE`."""

from __future__ import annotations

import os

import pytest
from hypothesis import Phase, settings

from tests.simulation.bugs import BUGS

#: A property test need not look for its smallest counterexample.
settings.register_profile("seeded", derandomize=True, database=None, phases=(Phase.explicit, Phase.generate))

#: The environment variable that names the bug.
VARIABLE = "SEEDED_BUG"


def pytest_collection_finish() -> None:
    """Inject the bug for the whole session."""
    BUGS[os.environ[VARIABLE]].patch(pytest.MonkeyPatch())
