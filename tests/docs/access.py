"""The table of docs/security.md, made from `rpc.access`: `python -m tests.docs.access` rewrites it.

It stands behind the marker `<!-- access -->`. Calls of one service that the same callers may make share a row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from hetpipe.rpc import access
from hetpipe.rpc.access import ACCESS, Rule
from hetpipe.spec.identity import Role
from tests.docs.pages import ROOT, with_table

PAGE = ROOT / "docs" / "security.md"

#: Those who call anything; the columns.
CALLERS = tuple(role for role in Role if any(role in rule for rule in ACCESS.values()))


def table() -> str:
    """Who may call what."""
    titles = ("service", "calls", *(f"{role}" for role in CALLERS))
    rows = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    rows += [f"| {' | '.join(cells)} |" for cells in _rows()]
    return "\n".join(rows) + "\n"


def _rows() -> Iterator[tuple[str, ...]]:
    calls_of: dict[tuple[str, ...], list[str]] = {}
    for name, rule in ACCESS.items():
        _, service, call = name.split("/")
        calls_of.setdefault((service, *_cells(rule)), []).append(f"`{call}`")
    for (service, *cells), calls in calls_of.items():
        yield (f"`{service.removeprefix('hetpipe.proto.v1.')}`", ", ".join(calls), *cells)


def _cells(rule: Rule) -> Iterator[str]:
    """What each role may: nothing, in its own name only, or anything."""
    for role in CALLERS:
        claim = rule.get(role)
        yield "" if claim is None else "yes" if claim is access._nobody else "own"


def rewritten(text: str) -> str:
    """The page with a fresh table."""
    return with_table(text, "access", table())


def main() -> int:
    """Rewrite the page; the exit status."""
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
