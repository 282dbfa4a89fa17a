"""The table of metrics in docs/observability.md: `python -m tests.docs.metrics` rewrites it."""

from __future__ import annotations

import sys

from hetpipe.observe.metric_names import FAMILIES, ROLES, Family
from tests.docs.pages import ROOT, with_table

PAGE = ROOT / "docs" / "observability.md"


def table() -> str:
    """The table."""
    rows = ["| metric | kind | unit | labels | exposed by | meaning |", "|---|---|---|---|---|---|"]
    rows += ["| " + " | ".join(_cells(family)) + " |" for family in FAMILIES.values()]
    return "\n".join(rows) + "\n"


def _cells(family: Family) -> list[str]:
    labels = ", ".join(f"`{label}`" for label in family.labels) or "–"
    roles = "all" if family.roles == ROLES else ", ".join(role.replace("_", " ") for role in family.roles)
    return [f"`{family.name}`", family.kind, family.unit, labels, roles, family.help]


def rewritten(text: str) -> str:
    """The page with a fresh table."""
    return with_table(text, "metrics", table())


def main() -> int:
    """Rewrite the page; the exit status."""
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
