"""`hetpipe ui`: where it may listen, and what it says when it cannot."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from hetpipe.cli.look.ui import TOKEN_VARIABLE, Options, check, listen, run
from hetpipe.errors import UserError
from hetpipe.runs.outcome import Output
from tests.cli.fakes import FakeCoordinator, shell_with


def test_beyond_this_machine_it_needs_a_token() -> None:
    for host in ("0.0.0.0", "::", "10.0.0.1", "training.example"):
        with pytest.raises(UserError, match=f"needs a token: --token, or {TOKEN_VARIABLE}"):
            check(Options(host=host))
        check(Options(host=host, token="long enough"))
    for host in ("127.0.0.1", "localhost", "::1"):
        check(Options(host=host))


def test_a_token_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(UserError, match="has 5 characters; use at least 8"):
        check(Options(token="12345"))


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}: .* choose another with --port"):
            listen("127.0.0.1", port)


def test_without_the_extra_it_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    output = Output(people=sys.stderr, complaints=sys.stderr, machine=None)
    with pytest.raises(UserError, match=r"pip install 'hetpipe\[ui\]'"):
        run(Options(runs_dir=tmp_path), output, shell_with(FakeCoordinator(), tmp_path))
