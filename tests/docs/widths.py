"""The site of `make docs` in a real browser, at the widths of a desk and of a phone; part of `make ui-test`.

No page scrolls sideways, and what is wider than the window, as tables and code are on a phone, scrolls inside.
Screenshots of some pages are in `build/docs/looked-at`. It takes a minute or two; needs what `tests.ui.browser` needs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.docs.site import BUILD, SITE
from tests.ui.browser import WIDTHS, launched

SHOTS = BUILD / "looked-at"

#: Pages of which screenshots are made, without suffix.
SHOWN = ("README", "docs/migrating", "docs/job-file", "docs/reference", "docs/benchmarks")

#: Scripts of a page put its tables into boxes that scroll: how often it is looked at until then, every 0.1 s.
_LOOKS = 50
_FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"

#: Parts that reach beyond the window, without a box around them that scrolls.
_CUT_OFF = """() => {
  const found = [];
  for (const element of document.querySelectorAll("article table, article pre, article img, article svg")) {
    const box = element.getBoundingClientRect();
    if (!box.width || box.right <= document.documentElement.clientWidth + 1) continue;
    let around = element;
    while (around && !["auto", "scroll"].includes(getComputedStyle(around).overflowX)) around = around.parentElement;
    const inner = element.querySelector("code");
    const scrolls = around || (inner && ["auto", "scroll"].includes(getComputedStyle(inner).overflowX));
    if (!scrolls) found.push(`${element.tagName}: ${element.textContent.trim().slice(0, 50)}`);
  }
  return found;
}"""


def problems_of(browser: Any, site: Path = SITE) -> Iterator[str]:
    """What is wrong with the pages of a site, each with page and width."""
    page = browser.new_page()
    for path in sorted(site.rglob("*.html")):
        name = str(path.relative_to(site))
        page.goto(path.as_uri(), wait_until="domcontentloaded", timeout=60_000)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            looks = 0
            while not (fits := page.evaluate(_FITS)) and looks < _LOOKS:
                page.wait_for_timeout(100)
                looks += 1
            if not fits:
                yield f"{name} at {width} px: scrolls sideways"
            yield from (f"{name} at {width} px: cut off: {one}" for one in page.evaluate(_CUT_OFF))
            if name.removesuffix(".html") in SHOWN:
                shot = SHOTS / f"{path.stem}-{width}.png"
                page.screenshot(path=str(shot), timeout=60_000)
    page.close()


def main() -> int:
    """Look at the site; the exit status."""
    if not SITE.is_dir():
        sys.stderr.write("there is no site: make docs\n")
        return 2
    SHOTS.mkdir(parents=True, exist_ok=True)
    with launched() as browser:
        if browser is None:
            return 2
        problems = list(problems_of(browser))
    where = SHOTS.relative_to(BUILD.parent.parent)
    told = problems or [f"the site fits windows of {' and '.join(map(str, WIDTHS))} px; screenshots in {where}"]
    sys.stdout.write("".join(f"{line}\n" for line in told))
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
