"""The server of `hetpipe ui`: reads runs, and changes nothing.

Without a token it answers requests for names of this machine only, so that no page of another site can read runs by a
name that it resolves to this address. With a token every request needs it: in the address once, after which a cookie
has it, or in the header `Authorization: Bearer`.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlencode

from markupsafe import Markup
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import URL
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hetpipe.runs.shell import Shell
from hetpipe.ui.page import (
    compare_page,
    is_over,
    list_page,
    list_parts,
    log_page,
    message_page,
    rows_of,
    run_page,
    run_parts,
)
from hetpipe.ui.snapshot import Brief, OpenRun, RunSnapshot, ask, brief_of, logs_of, runs_in, tail_of
from hetpipe.values.events import JobStatus

#: Interval at which followed runs are read, and the age up to which a read is reused.
REFRESH_SECONDS = 1.0
_NEW_SECONDS = 0.5

#: How long a page waits for the answers of coordinators, and how old an answer may be.
_ASK_SECONDS = 0.8
_OLD_SECONDS = 15.0

#: Length of a stream of changes; the browser then opens the next one. At most so many at a time.
STREAM_SECONDS = 600.0
MOST_STREAMS = 64

#: Runs that are kept open, and how many may stand side by side.
_MOST_OPEN = 32
LEAST_COMPARED, MOST_COMPARED = 2, 12

#: Names by which a browser on this machine addresses it.
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})

_COOKIE = "hetpipe_ui"

_HEADERS = {
    b"cache-control": b"no-store",
    b"referrer-policy": b"no-referrer",
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"cross-origin-resource-policy": b"same-origin",
}


class _Coordinators:
    """A cache of the status from coordinators. Queries run in threads, so that a slow one does not delay a page."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._pool = ThreadPoolExecutor(max_workers=8, thread_name_prefix="ui-asking")
        self._lock = threading.Lock()
        self._asked: dict[Path, Future[JobStatus | None]] = {}
        self._answers: dict[Path, tuple[float, JobStatus | None]] = {}

    def statuses(self, paths: Iterable[Path]) -> dict[Path, JobStatus | None]:
        """The status of runs without a result, by folder; omits those whose coordinator does not answer."""
        now = self._shell.clock.monotonic()
        open_ = [path for path in paths if not (path / "result.json").exists()]
        with self._lock:
            for path in open_:
                known = self._answers.get(path)
                if path not in self._asked and (known is None or now - known[0] >= _NEW_SECONDS):
                    self._asked[path] = self._pool.submit(ask, path, self._shell)
            pending = dict(self._asked)
        wait([pending[path] for path in open_ if path in pending], timeout=_ASK_SECONDS)
        now = self._shell.clock.monotonic()
        with self._lock:
            for path, asked in list(self._asked.items()):
                if asked.done():
                    self._answers[path] = now, asked.result()
                    del self._asked[path]
            found = {path: self._answers[path] for path in open_ if path in self._answers}
        return {path: status for path, (at, status) in found.items() if now - at <= _OLD_SECONDS}

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True)
class _CachedRun:
    """An open run, with its content when it was last read."""

    run: OpenRun
    lock: threading.Lock = field(default_factory=threading.Lock)
    at: float = float("-inf")
    snapshot: RunSnapshot | None = None


class Pages:
    """The pages of the runs in one folder."""

    def __init__(self, runs_dir: Path, shell: Shell) -> None:
        """Refer to the folder `runs_dir`, which may be missing."""
        self._runs_dir = runs_dir
        self._shell = shell
        self._coordinators = _Coordinators(shell)
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, _CachedRun] = OrderedDict()
        self._ended: dict[Path, tuple[int, Brief]] = {}
        self._streams = 0

    def close(self) -> None:
        """Stop querying coordinators."""
        self._coordinators.close()

    # -- what is read ------------------------------------------------------------------------------------------------

    def _briefs(self) -> list[Brief]:
        runs = runs_in(self._runs_dir)
        job_status = self._coordinators.statuses(runs.values())
        briefs = (self._brief(path, name, job_status.get(path)) for name, path in runs.items())
        return [brief for brief in briefs if brief is not None]

    def _brief(self, path: Path, name: str, job_status: JobStatus | None) -> Brief | None:
        try:
            changed = (path / "result.json").stat().st_mtime_ns
        except OSError:
            return brief_of(path, name, job_status, self._shell)
        known = self._ended.get(path)
        if known is not None and known[0] == changed:
            return known[1]
        brief = brief_of(path, name, job_status, self._shell)
        if brief is not None:
            self._ended[path] = changed, brief
        return brief

    def _snapshot(self, name: str) -> RunSnapshot:
        """The current content of a run.

        Raises:
            HTTPException: there is none of this name.
        """
        path = runs_in(self._runs_dir).get(name)
        if path is None:
            raise HTTPException(404, f"There is no run {name} in {self._runs_dir}.")
        with self._lock:
            opened = self._open.setdefault(path, _CachedRun(OpenRun(path, name)))
            self._open.move_to_end(path)
            while len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)
        with opened.lock:
            now = self._shell.clock.monotonic()
            if opened.snapshot is None or now - opened.at >= _NEW_SECONDS:
                job_status = self._coordinators.statuses([path]).get(path)
                opened.snapshot, opened.at = opened.run.read(job_status, self._shell), now
            if opened.snapshot is None:
                raise HTTPException(404, f"The run {name} is being created, or its run.json cannot be read.")
            return opened.snapshot

    # -- pages -------------------------------------------------------------------------------------------------------

    def runs(self, request: Request) -> Response:
        """The list of runs."""
        return HTMLResponse(list_page(rows_of(self._briefs()), str(self._runs_dir)))

    def run(self, request: Request) -> Response:
        """One run."""
        snapshot = self._snapshot(request.path_params["name"])
        return HTMLResponse(run_page(snapshot, now=self._shell.clock.wall()))

    def compare(self, request: Request) -> Response:
        """Runs side by side."""
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        if len(names) < LEAST_COMPARED or len(names) > MOST_COMPARED:
            raise HTTPException(400, f"Mark {LEAST_COMPARED} to {MOST_COMPARED} runs in the list, then compare them.")
        return HTMLResponse(compare_page([self._snapshot(name) for name in names]))

    def log(self, request: Request) -> Response:
        """The end of a log."""
        name, wanted = request.path_params["name"], request.path_params["log"]
        path = runs_in(self._runs_dir).get(name)
        log = None if path is None else next((one for one in logs_of(path) if one.name == wanted), None)
        if path is None or log is None:
            raise HTTPException(404, "There is no such log.")
        return HTMLResponse(log_page(name, log, tail_of(path / "logs" / log.name)))

    # -- changes -----------------------------------------------------------------------------------------------------

    def runs_changes(self, request: Request) -> Response:
        """The list of runs as it changes."""
        return self._stream(lambda: (list_parts(rows_of(self._briefs()), str(self._runs_dir)), False))

    def run_changes(self, request: Request) -> Response:
        """A run as it changes, until it has ended."""
        name = request.path_params["name"]

        def look() -> tuple[Mapping[str, Markup], bool]:
            snapshot = self._snapshot(name)
            return run_parts(snapshot, now=self._shell.clock.wall()), is_over(snapshot.brief)

        return self._stream(look)

    def _stream(self, look: Callable[[], tuple[Mapping[str, Markup], bool]]) -> Response:
        if self._streams >= MOST_STREAMS:
            raise HTTPException(503, f"{MOST_STREAMS} pages already follow runs on this server; close some.")
        return StreamingResponse(self._changes(look), media_type="text/event-stream")

    async def _changes(self, look: Callable[[], tuple[Mapping[str, Markup], bool]]) -> AsyncIterator[str]:
        """Server-sent events: first all parts of a page, then those that have changed."""
        self._streams += 1
        try:
            sent: Mapping[str, Markup] = {}
            ends = self._shell.clock.monotonic() + STREAM_SECONDS
            while self._shell.clock.monotonic() < ends:
                try:
                    parts, over = await run_in_threadpool(look)
                except HTTPException:
                    parts, over = {}, True  # the folder is gone
                changed = {name: part for name, part in parts.items() if sent.get(name) != part}
                yield _event("parts", changed) if changed else ": nothing new\n\n"
                if over:
                    yield _event("over", {})
                    return
                sent = parts
                await asyncio.sleep(REFRESH_SECONDS)
        finally:
            self._streams -= 1


def _event(name: str, data: Mapping[str, str]) -> str:
    """A server-sent event; JSON is one line."""
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


class AccessGuard:
    """Middleware: checks the token, or without one the name of the host in a request; adds security headers."""

    def __init__(self, app: ASGIApp, *, token: str | None, hosts: Collection[str]) -> None:
        """Guard `app`.

        Args:
            app: the guarded application.
            token: that every request needs; None: none.
            hosts: names by which requests may address this server if there is no token.
        """
        self._app = app
        self._token = token
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS.items()]
            await send(message)

        answer = self._answer(Request(scope)) or self._app
        await answer(scope, receive, send_guarded)

    def _answer(self, request: Request) -> Response | None:
        """A refusal, or the redirection that keeps the token in a cookie; None: the request may pass."""
        if self._token is None:
            name = (request.url.hostname or "").lower()
            if name in self._hosts:
                return None
            return PlainTextResponse(f"this server answers requests for {', '.join(sorted(self._hosts))} only\n", 403)
        kept, digest = request.cookies.get(_COOKIE, ""), _digest(self._token)
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if hmac.compare_digest(kept, digest) or (scheme.lower() == "bearer" and self._is_token(bearer)):
            return None
        given = request.query_params.get("token")
        if given is not None and self._is_token(given):
            rest = [(key, value) for key, value in request.query_params.multi_items() if key != "token"]
            # Only the path: the name by which the browser knows this server is its own.
            where = URL(path=request.url.path, query=urlencode(rest))
            answer = RedirectResponse(str(where), 303)
            answer.set_cookie(_COOKIE, digest, httponly=True, samesite="strict", secure=request.url.scheme == "https")
            return answer
        return PlainTextResponse("the token is missing or wrong: open the address that `hetpipe ui` has printed\n", 401)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(_digest(given), _digest(self._token or ""))


def _digest(token: str) -> str:
    return sha256(token.encode()).hexdigest()


def make_app(runs_dir: Path, shell: Shell, *, token: str | None, hosts: Collection[str] = LOOPBACK) -> ASGIApp:
    """The application.

    Args:
        runs_dir: folder of the runs.
        shell: for their coordinators, and the time.
        token: see `AccessGuard`.
        hosts: see `AccessGuard`.
    """
    pages = Pages(runs_dir, shell)
    routes = [
        Route("/", pages.runs),
        Route("/events", pages.runs_changes),
        Route("/compare", pages.compare),
        Route("/runs/{name:path}/logs/{log}", pages.log),
        Route("/runs/{name:path}/events", pages.run_changes),
        Route("/runs/{name:path}", pages.run),
    ]
    return AccessGuard(Starlette(routes=routes, exception_handlers={HTTPException: _refused}), token=token, hosts=hosts)


def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    title = {400: "Bad request", 404: "Not found"}.get(error.status_code, "Unavailable")
    sentence = error.detail if error.detail != "Not Found" else "There is no such page."
    return HTMLResponse(message_page(title, sentence), error.status_code)
