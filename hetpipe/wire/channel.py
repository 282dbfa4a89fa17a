"""gRPC channels with hetpipe's keepalive, reconnection and message limits.

A dead peer is detected within `KEEPALIVE_SECONDS + KEEPALIVE_TIMEOUT_SECONDS`. Reconnection attempts are short and
frequent, proxies are never used, and message sizes are limited explicitly.
"""

from __future__ import annotations

import grpc

from hetpipe.errors import UserError
from hetpipe.values.addresses import join_address, split_address

#: Seconds of silence after which either end sends a ping.
KEEPALIVE_SECONDS = 3

#: Seconds without a reply to a ping after which the connection counts as broken. On a slow link a ping queues behind
#: the data that the kernel has accepted already.
KEEPALIVE_TIMEOUT_SECONDS = 4

#: Maximum seconds a server waits for the handshake of a connection, and for its next call. Both stay below 10 s,
#: including gRPC's own delay in noticing.
HANDSHAKE_SECONDS = 5.0
IDLE_CONNECTION_SECONDS = 8.0

#: Maximum message size in either direction, in bytes; chunks of tensors are much smaller (`server/shard/chunks.py`).
MAX_MESSAGE_BYTES = 5 * 1024 * 1024

#: HTTP/2 frame size and flow-control window: tensor chunks are sent in few, large frames.
_FRAME_BYTES = 2**24 - 1
_LOOKAHEAD_BYTES = 16 * 1024 * 1024

#: Delays between connection attempts, to which gRPC adds a jitter of a fifth, and the timeout of one attempt. A
#: restarted server is found within 0.6 s.
_RECONNECT_FIRST_MS = 100
_RECONNECT_MAX_MS = 500

#: Minimum interval between DNS lookups while a server is unreachable: it may be restarted at another address.
_LOOK_UP_MS = 1_000
_CONNECT_MS = 3_000

Options = list[tuple[str, int | str]]


def message_options(max_message_bytes: int) -> Options:
    """Message limits of either end; -1, which gRPC reads as unlimited, is rejected."""
    if max_message_bytes <= 0:
        raise UserError(f"the largest message must be a positive number of bytes, not {max_message_bytes}")
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.http2.max_frame_size", _FRAME_BYTES),
        ("grpc.http2.lookahead_bytes", _LOOKAHEAD_BYTES),
    ]


def keepalive_options() -> Options:
    """Keepalive pings of either end, also while no call is pending."""
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_SECONDS * 1_000),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1_000),
        # This option decides, a minute by default. It also covers pings that measure the bandwidth: while the reply to
        # one is missing, no keepalive ping is sent.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_SECONDS * 1_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def silence_options() -> Options:
    """The time for which a server keeps idle connections; a client with further calls reconnects."""
    return [
        # Until the TLS and HTTP/2 handshakes are complete: two minutes by default.
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_SECONDS * 1_000)),
        # Then until the first call, and between two calls. A stream counts as a call for its whole duration.
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
        address: the server's `HOST:PORT`.
        credentials: TLS credentials; None: plaintext.
        server_name: the name expected in the server's certificate, instead of the host's.
        max_message_bytes: maximum message size in either direction.

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
    """Identity serializer for bytes."""
    return message
