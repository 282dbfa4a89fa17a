"""The pages of the documentation, and what can be taken out of them: fenced blocks, tables, headings, links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "examples").glob("*/README.md")),
)

_FENCE = "```"
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    """Of its first line of text, from 1."""
    language: str
    """Empty where the fence names none."""
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(language: str) -> list[Block]:
    """The fenced blocks of all pages in `language`."""
    return [block for page in PAGES for block in _blocks(page) if block.language == language]


def _blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    first, language, inside = 0, "", False
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.startswith(_FENCE):
            continue
        if inside:
            found.append(Block(page, first, language, "\n".join(lines[first - 1 : number - 1]) + "\n"))
        first, language, inside = number + 1, line.removeprefix(_FENCE).strip(), not inside
    assert not inside, f"{page}: a fence is not closed"
    return found


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    lines, inside = [], False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith(_FENCE):
            inside = not inside
        elif not inside:
            lines.append(line)
    return "\n".join(lines)


def links(page: Path) -> list[str]:
    """The targets of a page's links."""
    return _LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as they are made where Markdown is shown on the web."""
    headings = [line.lstrip("#").strip() for line in prose(page).splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def code_spans(text: str) -> list[str]:
    """What stands between backticks."""
    return _CODE.findall(text)


def table_after(page: Path, marker: str) -> list[list[str]]:
    """The rows, without the heading, of the first table after the line that begins with `marker`."""
    lines = prose(page).splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith(marker)), None)
    assert start is not None, f"{page} has no line that begins with {marker!r}"
    rows: list[list[str]] = []
    for line in lines[start:]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        elif rows:
            break
    return rows[2:]


def with_table(text: str, marker: str, table: str) -> str:
    """The text of a page with a fresh table behind `<!-- marker -->`."""
    behind = re.compile(rf"(<!-- {marker} -->\n)((?:\|.*\n)*)")
    return behind.sub(lambda found: found[1] + table, text)
