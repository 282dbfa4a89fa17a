"""A Redis for the tests of one module, empty before each."""

from tests.storage.redis_server import server, shared_server

__all__ = ["server", "shared_server"]
