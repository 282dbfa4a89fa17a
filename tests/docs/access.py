"""The tables of docs/security.md, made from `wire.calls`: `python -m tests.docs.access` rewrites them.

They stand behind the markers `<!-- access -->`, where calls of one service that the same callers may make share a row,
and `<!-- access-fields -->`, where fields of one call with the same outcomes do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from hetpipe.values.identity import Role
from hetpipe.wire import access
from hetpipe.wire.call import Rule
from hetpipe.wire.calls import ACCESS
from tests.docs.pages import ROOT, with_table
from tests.wire.access_fields import FIELDS

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
        yield (f"`{service.removeprefix('hetpipe.proto.v2.')}`", ", ".join(calls), *cells)


def _cells(rule: Rule) -> Iterator[str]:
    """What each role may: nothing, in its own name only, or anything."""
    for role in CALLERS:
        claim = rule.get(role)
        yield "" if claim is None else "yes" if claim is access.anybody else "own"


def field_table() -> str:
    """What happens to who names another's."""
    titles = ("call", "fields", *(f"{role}" for role in CALLERS))
    rows = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    rows += [f"| {' | '.join(cells)} |" for cells in _field_rows()]
    return "\n".join(rows) + "\n"


def _field_rows() -> Iterator[tuple[str, ...]]:
    fields_of: dict[tuple[str, ...], list[str]] = {}
    for name, fields in FIELDS.items():
        for path, outcomes in fields.items():
            told = tuple(str(outcomes.get(role, "")) for role in CALLERS)
            fields_of.setdefault((name.rpartition("/")[2], *told), []).append(f"`{path}`")
    for (call, *cells), paths in fields_of.items():
        yield (f"`{call}`", ", ".join(paths), *cells)


def rewritten(text: str) -> str:
    """The page with fresh tables."""
    return with_table(with_table(text, "access", table()), "access-fields", field_table())


def main() -> int:
    """Rewrite the page; the exit status."""
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
