"""The list of metrics keeps Prometheus's rules for names, and hetpipe's own."""

from __future__ import annotations

from hetpipe.observe.metric_names import FAMILIES, ROLES, families_of

#: What series may be told apart by.
LABELS = {
    "call", "condition", "event", "job", "kind", "name", "outcome", "reason", "role", "shard", "stage", "state",
    "status", "type", "version", "vw",
}  # fmt: skip


def test_every_name_tells_kind_and_unit() -> None:
    for family in FAMILIES.values():
        assert family.name.startswith("hetpipe_")
        assert family.name.endswith("_total") == (family.kind == "counter"), family.name
        assert family.unit not in {"seconds", "bytes"} or f"_{family.unit}" in family.name
        assert family.help.endswith("."), family.name
        assert family.roles, family.name


def test_labels_are_few() -> None:
    assert {label for family in FAMILIES.values() for label in family.labels} == LABELS
    assert max(len(family.labels) for family in FAMILIES.values()) == 3


def test_every_role_has_its_own() -> None:
    for role in ROLES:
        assert len(families_of(role)) > 5
        assert FAMILIES["hetpipe_info"] in families_of(role)
