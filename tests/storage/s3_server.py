"""A server of this machine that speaks S3: moto's, in threads of this process; and a connection to it that breaks."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import s3fs
from moto.s3.models import s3_backends
from moto.server import ThreadedMotoServer

#: A bucket in which everything is permitted.
BUCKET = "bucket"

_CHUNK_BYTES = 1 << 14


@dataclass(slots=True)
class S3Server:
    """The server, whose buckets are those of this process: two of them at a time share their buckets."""

    host: str
    port: int

    @property
    def environment(self) -> Mapping[str, str]:
        """What clients need to find it."""
        return environment_of(self.port)

    def client(self) -> s3fs.S3FileSystem:
        """A client that finds it without an environment."""
        return s3fs.S3FileSystem(
            key="test", secret="test", endpoint_url=self.environment["AWS_ENDPOINT_URL"], skip_instance_cache=True
        )

    def make_bucket(self, name: str, *denied: str) -> None:
        """Make a bucket whose objects nobody may do these actions to, for example `s3:PutObject`."""
        client = self.client()
        client.mkdir(name)
        if denied:
            statement = {
                "Effect": "Deny",
                "Principal": "*",
                "Action": list(denied),
                "Resource": f"arn:aws:s3:::{name}/*",
            }
            policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
            client.call_s3("put_bucket_policy", Bucket=name, Policy=policy)


def environment_of(port: int) -> dict[str, str]:
    """What clients need to find a server of S3 at a port of this machine."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",  # retries are hetpipe's
    }


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Start it, with `BUCKET`; its objects are gone at the end."""
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    try:
        server = S3Server(*running.get_host_and_port())
        server.make_bucket(BUCKET)
        yield server
    finally:
        for account in s3_backends.values():
            account["aws"].reset()
        running.stop()


@dataclass
class TearingProxy:
    """Passes bytes on to a server; a connection that uploads more than `torn_after` bytes is reset there.

    `torn_after` None: nothing is torn.
    """

    port_of_server: int
    torn_after: int | None = None
    num_torn: int = 0
    _listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))

    @property
    def port(self) -> int:
        """Where it listens."""
        port: int = self._listener.getsockname()[1]
        return port

    @contextmanager
    def running(self) -> Iterator[TearingProxy]:
        """Accept connections in the block."""
        threading.Thread(target=self._accept, name="tearing proxy", daemon=True).start()
        try:
            yield self
        finally:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self.port_of_server))
                threading.Thread(target=self._pass, args=(client, server), kwargs={"is_up": True}, daemon=True).start()
                threading.Thread(target=self._pass, args=(server, client), kwargs={"is_up": False}, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, *, is_up: bool) -> None:
        num_bytes = 0
        with suppress(OSError):
            while chunk := source.recv(_CHUNK_BYTES):
                num_bytes += len(chunk)
                if is_up and self.torn_after is not None and num_bytes > self.torn_after:
                    self.num_torn += 1
                    break
                target.sendall(chunk)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
