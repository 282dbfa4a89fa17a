"""`make ui-test`: the pages in a real browser, at two widths, in the light and in the dark.

Live, pending, finished, failed, rewound, empty, and with 64 virtual workers, their list and one without any; runs side
by side; and the pages that `hetpipe plan` and `hetpipe compare` write: nothing is wider than the window, every text
has enough contrast, everything can be reached and used by keyboard, no script fails, and no page asks anybody but its
server. The screenshots are in `build/ui`. It takes a minute or two; beyond `BUDGET_SECONDS` it fails.

Needs Chromium (`apt-get install chromium`) and `pip install playwright`.
"""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn

from hetpipe.clock import SYSTEM_CLOCK
from hetpipe.ui.app import make_app
from hetpipe.values.events import JobStatus
from tests.cli import plans
from tests.cli.fakes import FakeCoordinator, shell_with
from tests.comparison.test_page import RECORDS
from tests.comparison.test_page import page as comparison_page
from tests.report.test_plan_page import page as plan_page
from tests.ui import folders

BUDGET_SECONDS = 180.0
WIDTHS = (1280, 420)
SHOTS = Path("build") / "ui"

#: For a page, on a machine that is busy with other things.
_PATIENCE_MS = 60_000

#: Least contrast of text, by WCAG 2.2, level AA.
CONTRAST = 4.5

_PAGES = {
    "list": "/",
    "live": "/runs/live",
    "wide": "/runs/wide",
    "finished": "/runs/finished",
    "rewound": "/runs/rewound",
    "failed": "/runs/failed",
    "empty": "/runs/empty",
    "compare": "/compare?run=finished&run=rewound&run=failed",
    "log": "/runs/failed/logs/vw-1-stage-0.log",
    "missing": "/runs/missing",
    "pending": "/runs/later",
}

#: Texts with too little contrast: colours are drawn over each other as the browser does.
_PALE = """(least) => {
  const parse = (text) => {
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const light = (colour) => {
    const part = (value) => ((value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * part(colour[0]) + 0.7152 * part(colour[1]) + 0.0722 * part(colour[2]);
  };
  const ground = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const colour = parse(getComputedStyle(one).backgroundColor);
      if (colour[3] > 0.99) return colour;
    }
    return [255, 255, 255, 1];
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = Array.from(element.childNodes).filter((node) => node.nodeType === 3);
    const text = own.map((node) => node.data).join("").trim();
    if (!text || !element.checkVisibility() || ["SCRIPT", "STYLE"].includes(element.tagName)) continue;
    if (element.closest("svg")) continue; // drawn by "fill", over shapes
    const [one, other] = [light(parse(getComputedStyle(element).color)), light(ground(element))];
    const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    if (contrast < least) found.push(`${contrast.toFixed(2)}: ${text.slice(0, 60)}`);
  }
  return found;
}"""


class Told(FakeCoordinator):
    """A coordinator of the runs that train."""

    def __init__(self, by_run: dict[str, JobStatus]) -> None:
        super().__init__()
        self.by_run = by_run

    def status(self, job_id: Any = None) -> JobStatus:
        return self.by_run[str(job_id)]


@contextmanager
def served(runs_dir: Path) -> Iterator[str]:
    """The pages of runs of every kind, at an address."""
    statuses = {}
    for name, num_workers in (("live", 2), ("wide", 64)):
        path = folders.run_in(runs_dir, name, local=False, started=time.time() - 90)
        record = path / "run.json"
        record.write_text(record.read_text().replace('"small-1"', f'"{name}"'))
        folders.planned(path, num_workers=num_workers)
        folders.trained(path, num_workers=num_workers)
        folders.evaluated(path, 80, 160)
        folders.log(path, "coordinator.log")
        statuses[name] = folders.status_of(path, num_workers)
    folders.finished(runs_dir, "finished")
    folders.rewound(runs_dir, "rewound")
    folders.failed(runs_dir, "failed", "stage 0 of virtual worker 1 on n1/0 ran out of memory: it needs 13.1 of 12 GiB")
    folders.run_in(runs_dir, "empty")
    later = folders.run_in(runs_dir, "later", local=False, started=time.time() - 30)
    record = later / "run.json"
    record.write_text(record.read_text().replace('"small-1"', '"later"'))
    with serving(runs_dir, {**statuses, "later": folders.pending_status(later)}) as address:
        yield address


@contextmanager
def serving(runs_dir: Path, statuses: dict[str, JobStatus]) -> Iterator[str]:
    """The pages of the runs in a folder, at an address."""
    shell = replace(shell_with(Told(statuses), runs_dir.parent), clock=SYSTEM_CLOCK)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        app = make_app(runs_dir, shell, token=None)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(10.0)


def write_pages(folder: Path) -> dict[str, str]:
    """The pages that commands write: name → address."""
    texts = {"plan": plan_page(plans.equal_mix()), "comparison": comparison_page(RECORDS, folder)}
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: (folder / f"{name}.html").as_uri() for name in texts}


def watch(page: Any, what: str, address: str, problems: list[str]) -> None:
    """Report what fails in a page, and whom it asks but its server."""
    origin = "/".join(address.split("/")[:3])
    page.on("pageerror", lambda error: problems.append(f"{what}: {error}"))

    def asked(request: Any) -> None:
        if not request.url.startswith(origin):
            problems.append(f"{what}: asks {request.url}")

    page.on("request", asked)


def look(browser: Any, pages: dict[str, str], problems: list[str]) -> None:
    """Every page, by its address, in both widths and both colour schemes."""
    for scheme in ("light", "dark"):
        for width in WIDTHS:
            context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
            for name, address in pages.items():
                what = f"{name} at {width} px, {scheme}"
                page = context.new_page()
                watch(page, what, address, problems)
                page.goto(address, wait_until="domcontentloaded", timeout=_PATIENCE_MS)
                page.wait_for_timeout(150)
                if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                    problems.append(f"{what}: wider than the window")
                problems += [f"{what}: contrast {one}" for one in page.evaluate(_PALE, CONTRAST)]
                drawn = page.locator("figure.curves canvas").count()
                if drawn != page.locator("figure.curves").count():
                    problems.append(f"{what}: a curve is not drawn")
                page.screenshot(path=str(SHOTS / f"{name}-{width}-{scheme}.png"), full_page=True, timeout=_PATIENCE_MS)
                page.close()
            context.close()


def use(browser: Any, address: str, runs_dir: Path, problems: list[str]) -> None:
    """The keyboard alone: find a run, mark two, compare them; and a run that goes on while it is looked at."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, bypass_csp=True)  # waiting evaluates texts
    page.goto(address + "/", timeout=_PATIENCE_MS)
    page.wait_for_function("document.getElementById('line').textContent === 'live'", timeout=_PATIENCE_MS)
    page.keyboard.press("Tab")
    page.keyboard.type("wide")
    if page.locator("tbody tr:visible").count() != 1:
        problems.append("keyboard: the field does not find")
    page.wait_for_timeout(1_500)  # the list is sent again meanwhile
    if page.evaluate("document.activeElement.id") != "find" or page.locator("tbody tr:visible").count() != 1:
        problems.append("keyboard: what was typed is lost when the list changes")
    page.keyboard.press("ControlOrMeta+A")
    page.keyboard.press("Delete")
    for name in ("finished", "rewound"):
        page.locator(f"input[value={name}]").focus()
        page.keyboard.press("Space")
    page.get_by_role("button").focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/compare?**", timeout=_PATIENCE_MS)
    page.goto(address + "/runs/live", timeout=_PATIENCE_MS)
    page.wait_for_function("document.getElementById('line').textContent === 'live'", timeout=_PATIENCE_MS)
    page.locator("summary").focus()
    page.keyboard.press("Enter")
    before = page.locator("#charts figure").first.locator("td").first.inner_text()
    folders.trained(runs_dir / "live", waves=80)
    try:
        page.wait_for_function(
            "(old) => document.querySelector('#charts figure td').innerText !== old", arg=before, timeout=_PATIENCE_MS
        )
    except Exception as error:  # noqa: BLE001 - playwright's own
        problems.append(f"live: new waves do not appear: {error}")
    if not page.evaluate("document.querySelector('#job details').open"):
        problems.append("live: what was opened is closed when the page changes")
    page.close()


@contextmanager
def launched() -> Iterator[Any]:
    """A browser; None if there is none, which standard error says."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        sys.stderr.write("playwright is missing: .venv/bin/pip install playwright\n")
        yield None
        return
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        sys.stderr.write("a browser is missing: apt-get install chromium\n")
        yield None
        return
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


def main() -> int:
    began = time.monotonic()
    SHOTS.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder, launched() as browser:
        if browser is None:
            return 2
        runs_dir = Path(folder) / "runs"
        with served(runs_dir) as address, serving(Path(folder) / "none", {}) as none:
            pages = {name: address + path for name, path in _PAGES.items()} | {"none": none}
            pages |= write_pages(Path(folder))
            look(browser, pages, problems)
            use(browser, address, runs_dir, problems)
    took = time.monotonic() - began
    if took > BUDGET_SECONDS:
        problems.append(f"it took {took:.0f} s, the budget is {BUDGET_SECONDS:.0f}")
    told = problems or [f"{len(pages)} pages are in order ({took:.0f} s); screenshots in {SHOTS}"]
    sys.stdout.write("".join(f"{line}\n" for line in told))
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
