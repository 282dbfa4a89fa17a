"""What is not in the list is refused; what is comes in its order."""

from __future__ import annotations

import pytest

from hetpipe.observe.readings import Distribution, Reading, sorted_by_family


def test_the_order_is_that_of_the_list() -> None:
    readings = [
        Reading("hetpipe_vw_clock", 3, ("j", 1)),
        Reading("hetpipe_jobs", 1, ("running",)),
        Reading("hetpipe_vw_clock", 4, ("j", 0)),
    ]
    found = sorted_by_family(readings, "coordinator")
    assert {family.name: [reading.value for reading in group] for family, group in found.items()} == {
        "hetpipe_jobs": [1],
        "hetpipe_vw_clock": [3, 4],
    }
    assert [family.name for family in found] == ["hetpipe_jobs", "hetpipe_vw_clock"]


@pytest.mark.parametrize(
    ("reading", "sentence"),
    [
        (Reading("hetpipe_wishes", 1), "hetpipe_wishes is not in the list of metrics"),
        (Reading("hetpipe_children", 1, ("stage",)), "exposed by agent, not by a coordinator"),
        (Reading("hetpipe_jobs", 1), r"has the labels \('state',\), not \(\)"),
        (Reading("hetpipe_rpc_seconds", 1.0, ("Push",)), "is a histogram; 1.0 is not a valid value"),
        (Reading("hetpipe_jobs", Distribution((1,), 1.0), ("running",)), "is a gauge"),
    ],
)
def test_what_is_not_in_the_list_is_refused(reading: Reading, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        sorted_by_family([reading], "coordinator")
