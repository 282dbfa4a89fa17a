"""A redis-server of a test's own."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None,
    reason="NOT TESTED: the Redis store, because there is no redis-server; `make setup` installs it",
)


def started(*command: str, folder: Path) -> subprocess.Popen[str]:
    """A redis-server that is ready, working in `folder`; whoever starts it ends it."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = []
    for line in process.stdout:
        told.append(line)
        if "eady to accept connections" in line:
            return process
    process.communicate()
    pytest.fail("".join(told))


def end(process: subprocess.Popen[str], *, kill: bool) -> int:
    """End a server and wait for its end; its exit status."""
    if kill:
        process.kill()
    else:
        process.terminate()
    process.communicate(timeout=10)
    return process.returncode


class Server:
    """On a Unix socket, without persistence unless `options` ask for it."""

    def __init__(self, folder: Path, *options: str, user: str = "") -> None:
        """Start it, and look at it as `user`."""
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._folder = folder
        self._command = (
            *("redis-server", "--port", "0", "--unixsocket", str(self.socket)),
            *("--save", "", "--appendonly", "no"),
            *options,
        )
        self._process = started(*self._command, folder=folder)
        self.redis = redis.Redis(
            unix_socket_path=str(self.socket), decode_responses=True, username=user or None, password=user or None
        )

    def advance(self, seconds: float) -> None:
        """Let every time to live shrink by so much."""
        for key in self.redis.scan_iter():
            left_ms = self.redis.pttl(key)
            if left_ms >= 0:
                if left_ms > seconds * 1_000:
                    self.redis.pexpire(key, round(left_ms - seconds * 1_000))
                else:
                    self.redis.delete(key)

    def restart(self, *, kill: bool) -> None:
        """End it, by SIGTERM or by SIGKILL, and start it with what is on its disk."""
        self.redis.connection_pool.disconnect()
        assert end(self._process, kill=kill) == (-signal.SIGKILL if kill else 0)
        self._process = started(*self._command, folder=self._folder)

    def stop(self) -> None:
        self.redis.close()
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: Server) -> Server:
    shared_server.redis.flushall()
    return shared_server
