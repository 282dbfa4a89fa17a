"""Fixtures of all tests."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import zlib
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
import structlog
import typer.testing
from hypothesis import HealthCheck, settings

from tests import pairwise

#: Property tests draw the same cases each time, so that a change fails by its own fault alone. `make fresh-cases` draws
#: others, twice as many where a test states no number; what these find becomes an `@example`. None of them fails by the
#: time that it takes: the machine may be busy.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", _UNTIMED, derandomize=True, max_examples=50)
settings.register_profile("fresh", _UNTIMED, derandomize=False)
settings.load_profile("repeatable")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """One thread per operation: sums that must agree bit for bit are then added in one order."""
    import torch  # two seconds and a half, which the process that only hands out tests does without

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _commands_made_once() -> Iterator[None]:
    """To make the commands takes typer longer than most of them take, and they keep nothing of a call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", cache(vars(typer.testing)["_get_command"]))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a share of the tests run: what CI does with those that are too many for every change."""
    parser.addoption("--part", metavar="K/N", help="only part K of N of the tests, K from 0 to N - 1")


def pytest_configure(config: pytest.Config) -> None:
    """Processes that tests start hear Ctrl-C also where a shell runs the tests in the background, which ignores it."""
    pairwise.gives_all = "not exhaustive" not in config.option.markexpr
    gc.disable()  # until all tests are collected: nearly all that is made by then stays, and is looked through in vain
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import a share of the test modules first, each worker another one.

    All workers collect everything, in the same order: where nobody has left bytecode, each would rewrite the
    assertions of every module, which takes ten seconds of a core. So each finds there what the others have done.
    """
    count, own = os.environ.get("PYTEST_XDIST_WORKER_COUNT"), os.environ.get("PYTEST_XDIST_WORKER", "")
    if count is None or len(session.config.args) != 1:
        return
    folder = Path(session.config.args[0]).resolve()
    for file in sorted(folder.rglob("test_*.py"))[int(own.removeprefix("gw")) :: int(count)]:
        with suppress(Exception, pytest.skip.Exception):  # collection tells of it
            importlib.import_module(".".join(file.relative_to(session.config.rootpath).with_suffix("").parts))


#: Which tests begin first: those that wait for processes, and then those that compute for long, so that no worker is
#: alone with one of them at the end.
_FIRST = ("processes", "matrix")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files with long tests first; within a file, and among files of a kind, the order stays."""
    if (part := config.option.part) is not None:
        wanted, count = map(int, part.split("/"))
        chosen = [item for item in items if zlib.crc32(item.nodeid.encode()) % count == wanted]
        config.hook.pytest_deselected(items=list(set(items).difference(chosen)))
        items[:] = chosen
    kinds: dict[Path, int] = {}
    for item in items:
        kind = next((number for number, mark in enumerate(_FIRST) if item.get_closest_marker(mark)), len(_FIRST))
        kinds[item.path] = min(kind, kinds.get(item.path, len(_FIRST)))
    items.sort(key=lambda item: kinds[item.path])


def pytest_collection_finish() -> None:
    """Modules and collected tests stay to the end; no garbage collection need look at them.

    Nor often at the rest: with Python's own thresholds, which are for processes that run for longer, collections took
    a twelfth of a core.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say aloud what was not tested, where a skip hides something that `make test` promises."""
    skipped = [report.longrepr for report in terminalreporter.stats.get("skipped", ())]
    reasons = {longrepr[2].removeprefix("Skipped: ") for longrepr in skipped if isinstance(longrepr, tuple)}
    for reason in sorted(reason for reason in reasons if reason.startswith("NOT TESTED")):
        terminalreporter.write_line(reason, yellow=True, bold=True)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A test that configures logging, as every command does, leaves it to the next one as it found it."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


#: What a run writes into its folder first; found in the current one, it is of a run that was given none.
_RUN_FILES = ("decisions.jsonl", "history", "checkpoints", "metrics", "facts.json")
_HERE = Path.cwd()
_seen_here = {name for name in _RUN_FILES if (_HERE / name).exists()}


@pytest.fixture(scope="module", autouse=True)
def _nothing_of_a_run_here() -> Iterator[None]:
    """Fail the first module after which files of a run are in the current folder, which is the checkout's.

    Not of each test: most take less time than to look.
    """
    yield
    found = {name for name in _RUN_FILES if (_HERE / name).exists()} - _seen_here
    _seen_here.update(found)
    assert not found, f"a run without a folder wrote {', '.join(sorted(found))} into {_HERE}; give it a run_dir"
