"""Transfer of one push into a shard's staging buffer."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hetpipe.errors import MalformedChunk, NonFiniteUpdate, ProtocolViolation
from hetpipe.server.shard.chunks import ByteRun, ChunkReceiver, RunMap, stream_parts
from hetpipe.values.requests import PushHeader, Watermarks
from hetpipe.weights.flat import FlatBuffer, finite
from hetpipe.wire.call import Chunk


class PushSession:
    """Transfer of one admitted push into the staging buffer.

    A resend that arrives during an earlier attempt takes over: the earlier one writes nothing more.
    """

    def __init__(
        self,
        header: PushHeader,
        indices: tuple[int, ...],
        buffer: FlatBuffer,
        complete: Callable[[PushSession], Watermarks],
    ) -> None:
        """Start before the first byte.

        Args:
            header: header of the push.
            indices: positions of its slices in the shard.
            buffer: destination.
            complete: called after the last byte; returns the watermark of its virtual worker, or raises if the
            push was superseded or dropped.
        """
        self.header = header
        self.indices = indices
        self._buffer = buffer
        self._complete = complete
        slots = buffer.layout.slots
        self._runs = RunMap(header.slices, [slots[i].offset for i in indices])
        self._receiver = ChunkReceiver(buffer, self._runs)
        self._lock = threading.Lock()
        #: The error that ended this session, once it has ended.
        self._ended: ProtocolViolation | None = None

    def write(self, chunk: Chunk) -> None:
        """Process the next chunk.

        Raises:
            MalformedChunk: see `ChunkReceiver.write`.
            NonFiniteUpdate: NaN or infinity, named by parameter; no part of this wave will be applied.
        """
        with self._lock:
            if self._ended is not None:
                raise self._ended
            try:
                for piece in self._receiver.write(chunk):
                    self._check_finite(piece)
            except ProtocolViolation as error:
                self._ended = error
                raise

    def finish(self) -> Watermarks:
        """Complete the push, which then counts as staged; returns the watermark of its virtual worker.

        Raises:
            MalformedChunk: bytes are missing.
            ProtocolViolation: the error that ended the session before.
        """
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._receiver.finish()
            return self._complete(self)

    @property
    def stream(self) -> list[bytes | memoryview]:
        """Bytes in stream order, with zero padding."""
        return list(stream_parts(self._buffer.memory(), self._runs, 0, self._runs.num_bytes))

    @property
    def sums(self) -> tuple[bytes, ...] | None:
        """Implement `ChunkReceiver.sums`."""
        return self._receiver.sums

    def abandon(self) -> None:
        """Stop writing: a resend took over, or the wave was dropped."""
        with self._lock:
            self._ended = self.given_up()

    def given_up(self) -> MalformedChunk:
        """Reason for rejecting further bytes."""
        return MalformedChunk(f"this push of {self.header.requester} was superseded by a later one")

    def _check_finite(self, piece: ByteRun) -> None:
        start, end = piece.buffer, piece.buffer + piece.num_bytes
        for (dtype, first, last), region in zip(self._buffer.layout.regions, self._buffer.regions, strict=True):
            low, high = max(start, first), min(end, last)
            size = region.element_size()
            if low < high and not finite(region[(low - first) // size : -(-(high - first) // size)]):
                names = [s.name for s in self._buffer.layout.slots if s.offset < high and s.offset + s.num_bytes > low]
                what = "initial weights" if self.header.wave is None else f"wave {self.header.wave}"
                raise NonFiniteUpdate(
                    f"{what} of {self.header.requester} is not finite ({dtype}) in or near {', '.join(names[:3])}"
                )
