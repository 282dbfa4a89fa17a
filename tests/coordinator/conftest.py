"""A Redis for the tests of one module, empty before each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.coordinator.redis_server import Server


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def server(shared_server: Server) -> Server:
    shared_server.redis.flushall()
    return shared_server
