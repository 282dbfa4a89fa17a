"""Which commands begin with a fork server, before they have read anything."""

from __future__ import annotations

import pytest

from hetpipe.cli.main import starts_services


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["demo"], True),
        (["train", "job.yaml", "--set", "epochs=1"], True),
        (["train", "job.yaml", "--coordinator", "node-1:7000"], False),
        (["train", "job.yaml", "--coordinator=node-1:7000"], False),
        (["train", "--help"], False),
        (["submit", "job.yaml"], False),
        (["serve", "agent"], False),
        ([], False),
    ],
)
def test_only_what_starts_services_on_this_machine(arguments: list[str], *, expected: bool) -> None:
    assert starts_services(arguments) is expected
