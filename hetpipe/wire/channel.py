"""Channels: how every client of hetpipe connects.

A channel notices a dead peer within `KEEPALIVE_SECONDS + KEEPALIVE_TIMEOUT_SECONDS`, tries again soon and often, never
goes through a proxy, and has explicit message limits.
"""

from __future__ import annotations

import grpc

from hetpipe.errors import UserError
from hetpipe.values.addresses import join_address, split_address

#: Seconds of silence after which either end pings the other.
KEEPALIVE_SECONDS = 3

#: Seconds a ping may stay unanswered before the connection counts as broken. On a slow link it waits behind what the
#: kernel has taken already.
KEEPALIVE_TIMEOUT_SECONDS = 4

#: Longest that a server waits for a connection to agree on how to speak, and for its next call. Both are below 10 s,
#: with the time that gRPC takes to notice.
HANDSHAKE_SECONDS = 5.0
IDLE_CONNECTION_SECONDS = 8.0

#: Largest message either way, in bytes: a tensor chunk of 4 MiB with its header, and some room.
MAX_MESSAGE_BYTES = 5 * 1024 * 1024

#: HTTP/2 frame size and how far a sender may run ahead of the reader: chunks of tensors travel in few, large pieces.
_FRAME_BYTES = 2**24 - 1
_LOOKAHEAD_BYTES = 16 * 1024 * 1024

#: Pauses between two attempts to connect, which gRPC makes longer or shorter by a fifth, and how long one attempt may
#: take. So a server that comes back is found within 0.6 s.
_RECONNECT_FIRST_MS = 100
_RECONNECT_MAX_MS = 500

#: A server may come back at another address: its name is looked up anew this often at most, while it is away.
_LOOK_UP_MS = 1_000
_CONNECT_MS = 3_000

Options = list[tuple[str, int | str]]


def message_options(max_message_bytes: int) -> Options:
    """Message limits of either end; -1, gRPC's word for "no limit", is refused."""
    if max_message_bytes <= 0:
        raise UserError(f"the largest message must be a positive number of bytes, not {max_message_bytes}")
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.http2.max_frame_size", _FRAME_BYTES),
        ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),
    ]


def keepalive_options() -> Options:
    """Pings of either end, also while no call is under way."""
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1_000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1_000),
        # This is the one that counts, a minute by default. It is also for pings that measure the bandwidth: while the
        # answer to one of them is missing, no keepalive is sent.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def silence_options() -> Options:
    """How long a server keeps connections that do not speak: whoever really wants something connects again."""
    return [
        # Until TLS is agreed on, and the settings of HTTP/2 are there: two minutes by default.
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_SECONDS * 1_000)),
        # Then until the first call, and between two calls. A stream counts as a call for as long as it lasts.
        ("grpc.max_connection_idle_ms", int(IDLE_CONNECTION_SECONDS * 1_000)),
    ]


def open_channel(
    address: str,
    *,
    credentials: grpc.ChannelCredentials | None = None,
    server_name: str = "",
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.Channel:
    """A channel to the server at `address` (`HOST:PORT`). It connects on first use; the caller closes it.

    Args:
        address: whom to dial.
        credentials: what to prove oneself with; None: plaintext.
        server_name: the name that the server's certificate must have, instead of the host's.
        max_message_bytes: longest message either way.

    Raises:
        UserError: the address is malformed.
    """
    host, port = split_address(address)
    options: Options = [
        *message_options(max_message_bytes),
        *keepalive_options(),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_FIRST_MS),
        ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_MAX_MS),
        ("grpc.dns_min_time_between_resolutions_ms", _LOOK_UP_MS),
    ]
    target = join_address(host, port)
    if credentials is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, credentials, [*options, ("grpc.ssl_target_name_override", server_name)])


def as_is(message: bytes) -> bytes:
    """Bytes need no serializer."""
    return message
