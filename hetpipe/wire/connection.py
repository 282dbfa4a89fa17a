"""A client's connection to one server: a channel, replaced on certificate rotation, and translation of errors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from hetpipe.clock import SYSTEM_CLOCK, Clock
from hetpipe.errors import HetpipeError, PeerUnreachable, Unauthenticated
from hetpipe.values.addresses import split_address
from hetpipe.wire.channel import open_channel
from hetpipe.wire.grpc_internals import hung_up
from hetpipe.wire.status import translate_rpc_error
from hetpipe.wire.tls import Tls
from hetpipe.wire.tls_diagnosis import diagnose

#: Hint for a server that closes the connection of a client without TLS before the handshake.
_TLS_HINT = "; if it was started with --tls, give --tls DIR here, too"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server to connect to."""

    address: str
    """`HOST:PORT`."""
    role: str
    """The peer's role for error messages, for example `coordinator`."""
    tls: Tls | None = None
    """None: plaintext."""
    server_name: str = ""
    """The name expected in the peer's certificate; required with TLS."""


@dataclass(eq=False, slots=True)
class _Life:
    """One channel, created with one version of the certificates."""

    channel: grpc.Channel
    version: int
    users: int = 0


class Connection:
    """A shared channel, borrowed by each call for its duration. Thread-safe; `close` cancels all calls.

    When the certificates change, new calls use a new channel; the old one is closed when its last call has ended, so a
    rotation interrupts no call.
    """

    def __init__(self, target: Target, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """Create the channel; it connects on the first call.

        Raises:
            UserError: the address is malformed.
        """
        self.target = target
        self._clock = clock
        self._lock = threading.Lock()
        self._closed = False
        self._current = self._open()
        #: Channels of older certificates with pending calls.
        self._retired: list[_Life] = []

    @contextmanager
    def channel(self) -> Iterator[grpc.Channel]:
        """Borrow the channel for one call."""
        with self._lock:
            self._renew()
            life = self._current
            life.users += 1
        try:
            yield life.channel
        finally:
            with self._lock:
                life.users -= 1
                ended = life.users == 0 and life in self._retired
                if ended:
                    self._retired.remove(life)
            if ended:
                life.channel.close()

    def close(self) -> None:
        """Cancel all calls and close the connection."""
        with self._lock:
            self._closed = True
            lives, self._retired = [self._current, *self._retired], []
        for life in lives:
            life.channel.close()

    @contextmanager
    def calling(self, call: str, started: float, awaited: str = "an answer") -> Iterator[grpc.Channel]:
        """Borrow the channel for one call begun at `started`, and translate its errors into typed ones.

        Raises:
            HetpipeError: the server's own error, or a failure of the connection.
        """
        with self.channel() as channel:
            try:
                yield channel
            except grpc.RpcError as error:
                raise self.translated(error, call, started, awaited) from error
            except ValueError as error:
                if isinstance(error, HetpipeError):
                    raise
                raise self._closed_here(error) from error

    def translated(self, error: grpc.RpcError, call: str, started: float, awaited: str = "an answer") -> HetpipeError:
        """The typed error of a failed call begun at `started`."""
        target = self.target
        typed = translate_rpc_error(
            error,
            peer=target.address,
            role=target.role,
            call=call,
            elapsed_seconds=self._clock.monotonic() - started,
            awaited=awaited,
        )
        if not isinstance(typed, PeerUnreachable):
            return typed
        if target.tls is None:
            return PeerUnreachable(f"{typed}{_TLS_HINT}") if hung_up(str(typed)) else typed
        # Checked twice: a server that is shutting down closes connections like one that rejects them, and then it is
        # gone.
        diagnosis = self._diagnosed(target.tls) and self._diagnosed(target.tls)
        return Unauthenticated(f"{target.role} at {target.address} refused {call}: {diagnosis}") if diagnosis else typed

    def _diagnosed(self, tls: Tls) -> str:
        host, port = split_address(self.target.address)
        return diagnose(host, port, material=tls.material, server_name=self.target.server_name)

    def _closed_here(self, error: ValueError) -> PeerUnreachable:
        """The error of a call on a closed channel; gRPC itself raises a ValueError."""
        target = self.target
        return PeerUnreachable(
            f"the connection to the {target.role} at {target.address} was closed on this side ({error})"
        )

    def _renew(self) -> None:
        """Open a new channel if the certificates have changed."""
        tls = self.target.tls
        if tls is None or self._closed or tls.material.version == self._current.version:
            return
        old, self._current = self._current, self._open()
        if old.users:
            self._retired.append(old)
        else:
            old.channel.close()

    def _open(self) -> _Life:
        target = self.target
        if target.tls is None:
            return _Life(open_channel(target.address), 0)
        material = target.tls.material
        credentials = target.tls.channel_credentials(material)
        return _Life(
            open_channel(target.address, credentials=credentials, server_name=target.server_name), material.version
        )
