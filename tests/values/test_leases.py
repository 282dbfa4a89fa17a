"""Leases and heartbeats have one place."""

from __future__ import annotations

import ast
from pathlib import Path

from hetpipe.values import leases
from tests.docs.pages import ROOT

NAMES = {"LEASE_SECONDS", "LEADER_LEASE_SECONDS", "AFTER_LEASE_SECONDS", "HEARTBEATS_PER_LEASE"}


def assigned(path: Path) -> set[str]:
    """Names at the top of a module, without the underscore of private ones."""
    source = path.read_text(encoding="utf-8")
    if not any(name in source for name in NAMES):
        return set()
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    targets = (target for node in nodes for target in node.targets)
    return {target.id.lstrip("_") for target in targets if isinstance(target, ast.Name)}


def test_each_is_defined_once() -> None:
    found = {
        (name, str(path.relative_to(ROOT)))
        for path in Path(ROOT, "hetpipe").rglob("*.py")
        for name in assigned(path) & NAMES
    }
    assert found == {(name, "hetpipe/values/leases.py") for name in NAMES}


def test_several_heartbeats_fall_into_a_lease() -> None:
    assert leases.heartbeat_seconds(5.0) == 1.0
    assert leases.heartbeat_seconds(leases.LEASE_SECONDS) * 2 < leases.LEASE_SECONDS
