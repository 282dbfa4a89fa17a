"""`make docs`: the pages of the project as a site, in `build/docs/site`.

The pages are those that are read in the source; here they get a navigation, a search, the API reference from
docstrings, and the notebooks. Zensical checks that every link and every anchor leads
somewhere, a test that every page is in the navigation, and `remote_references` that a browser needs no other server.

It runs in an environment of its own with `requirements-docs.lock` (`make docs`) and imports nothing but the root
package of hetpipe, which does without torch.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import hetpipe
from tests.docs.pages import PAGES, ROOT

BUILD = ROOT / "build" / "docs"
SOURCE, SITE = BUILD / "pages", BUILD / "site"

#: Pages that the tests of commands and job files leave out.
_MORE_PAGES = ("SECURITY.md", "hetpipe/vendor/uplot/README.md")

#: What pages show or link to.
_FIGURES = (
    "LICENSE", "docs/**/*.svg", "docs/**/*.html", "docs/schemas/*.json", "examples/*/*.svg", "examples/*/*.html",
    "hetpipe/vendor/uplot/LICENSE",
)  # fmt: skip

#: A fence with a second word, which is for tests.
_FENCE = re.compile(r"^(```\w+) .*$", re.MULTILINE)

#: Something a browser would fetch from another server to show a page: a script, a style sheet, a font, a picture.
_REMOTE = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\ssrc="?(?:https?:)?//[^\s">]+"""
    r"""|<link\b(?=[^>]*\brel="?(?:stylesheet|preload|preconnect|icon))[^>]*\shref="?(?:https?:)?//[^\s">]+"""
    r"""|url\(["']?(?:https?:)?//[^)]+""",
)

#: Generated page → its title.
REFERENCE = "docs/reference.md"
NOTEBOOKS = ROOT / "examples" / "notebooks"


def stage(source: Path = SOURCE) -> None:
    """Copy pages and figures to `source` where they are in the project, so that links between them hold."""
    shutil.rmtree(source, ignore_errors=True)
    for path in (found for pattern in _FIGURES for found in ROOT.glob(pattern)):
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    for name, text in pages().items():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """The pages of the site, by path from the project's root, with their Markdown."""
    written = {path: path.read_text(encoding="utf-8") for path in (*PAGES, *(ROOT / name for name in _MORE_PAGES))}
    return {
        **{str(path.relative_to(ROOT)): _on_site(text) for path, text in written.items()},
        **{
            str(path.relative_to(ROOT).with_suffix(".md")): _on_site(
                page_of(json.loads(path.read_text(encoding="utf-8")))
            )
            for path in NOTEBOOKS.glob("*.ipynb")
        },
        REFERENCE: reference(),
    }


def _on_site(text: str) -> str:
    return _FENCE.sub(r"\1", text).replace(".ipynb)", ".md)")


def reference() -> str:
    """The page with the docstrings of all public names."""
    names = [
        f"::: {module}.{name}\n" for name, module in sorted(hetpipe._HOMES.items(), key=lambda home: home[0].lower())
    ]
    head = (
        "# API reference\n\nThe public names of `hetpipe`; [From Python](python.md) shows how they are used together.\n"
    )
    return "\n".join([head, *names])


def page_of(notebook: Mapping[str, Sequence[Mapping[str, object]]]) -> str:
    """A notebook as a page: its text, and its code in fences."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(map(str, cell["source"])) if isinstance(cell["source"], list) else str(cell["source"])
        is_text = cell["cell_type"] == "markdown"
        parts.append(text if is_text else f"```python\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def remote_references(site: Path = SITE) -> Iterator[str]:
    """What pages of a site fetch from other servers, as FILE: TEXT."""
    for path in sorted((*site.rglob("*.html"), *site.rglob("*.css"))):
        for found in _REMOTE.finditer(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)}: {found[0]}"


def main() -> int:
    """Build; the exit status."""
    stage()
    built = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", "mkdocs.yml"], cwd=ROOT, check=False
    )
    if built.returncode:
        return built.returncode
    if remote := list(remote_references()):
        sys.stderr.write("\n".join(["these would be fetched from other servers:", *remote, ""]))
        return 1
    pages = len(list(SITE.rglob("*.html")))
    where = SITE.relative_to(ROOT)
    sys.stdout.write(f"{pages} pages in {where}; to read them: python3 -m http.server --directory {where}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
