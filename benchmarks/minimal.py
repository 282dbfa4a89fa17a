"""The least that a push or a pull through shared memory can cost: the same passes over the bytes, and nothing else.

*Push*: this process copies each MiB into a slot of a shared ring and sums it; the other one copies it out, sums its
copy, checks that it is finite, and at the end adds the whole to its weights. *Pull*: the other way, without the last
two. No calls, no headers, no admission, no clocks: how near hetpipe comes is what these cost. The other process has a
thread for each stream, as a parameter server has.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

from hetpipe.checksum import checksum
from hetpipe.weights.allocator import keep_freed_memory
from hetpipe.weights.flat import FlatBuffer, FlatLayout, finite

_CHUNK = 1 << 20
_SLOTS = 4
_CPU = torch.device("cpu")


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _buffer(num_bytes: int) -> FlatBuffer:
    return FlatBuffer(FlatLayout([("p", (num_bytes // 4,), "float32")]), _CPU)


def _send(end: socket.socket, ring: int, source: FlatBuffer) -> None:
    memory, address, in_use = source.memory(), source.data.data_ptr(), 0
    for number, offset in enumerate(range(0, memory.nbytes, _CHUNK)):
        if in_use == _SLOTS:
            end.recv(1)
            in_use -= 1
        size = min(_CHUNK, memory.nbytes - offset)
        ctypes.memmove(ring + number % _SLOTS * _CHUNK, address + offset, size)
        end.send(checksum(memory[offset : offset + size], place=offset))
        in_use += 1
    for _ in range(in_use):
        end.recv(1)


def _receive(end: socket.socket, ring: int, target: FlatBuffer, *, is_checked: bool) -> None:
    memory, address = target.memory(), target.data.data_ptr()
    numbers = next(iter(target.views.values()))
    for number, offset in enumerate(range(0, memory.nbytes, _CHUNK)):
        total = end.recv(8)
        size = min(_CHUNK, memory.nbytes - offset)
        ctypes.memmove(address + offset, ring + number % _SLOTS * _CHUNK, size)
        end.send(b"t")
        assert checksum(memory[offset : offset + size], place=offset) == total
        if is_checked:
            assert finite(numbers[offset // 4 : (offset + size) // 4])


def serve(ends: Sequence[socket.socket], num_bytes: int) -> None:
    """The other process, with `num_bytes` for each stream."""
    keep_freed_memory(one_heap=False)
    torch.set_num_threads(2)
    with ThreadPoolExecutor(len(ends)) as pool:
        list(pool.map(lambda end: _serve_stream(end, num_bytes), ends))


def _serve_stream(end: socket.socket, num_bytes: int) -> None:
    _, descriptors, _, _ = socket.recv_fds(end, 1, 1)
    memory = mmap.mmap(descriptors[0], _SLOTS * _CHUNK)
    weights, update = _buffer(num_bytes), _buffer(num_bytes)
    end.send(b"r")
    while command := end.recv(1):
        if command == b"p":
            _receive(end, _address(memory), update, is_checked=True)
            update.add_(weights)
            weights, update = update, weights
            end.send(b"d")
        else:
            _send(end, _address(memory), weights)


@contextmanager
def minimal_streams(num_streams: int, num_bytes: int) -> Iterator[Sequence[Minimal]]:
    """Streams to another process, each of `num_bytes`."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(num_streams)]
    theirs = [end for _, end in pairs]
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, num_bytes), daemon=True)
    process.start()
    for end in theirs:
        end.close()
    try:
        yield [Minimal(end) for end, _ in pairs]
    finally:
        process.kill()
        process.join(5)
        for end, _ in pairs:
            end.close()


class Minimal:
    """This process's end of a stream."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        descriptor = os.memfd_create("minimal")
        os.ftruncate(descriptor, _SLOTS * _CHUNK)
        self._memory = mmap.mmap(descriptor, _SLOTS * _CHUNK)
        socket.send_fds(end, [b"m"], [descriptor])
        os.close(descriptor)
        end.recv(1)

    def push(self, update: FlatBuffer) -> None:
        """Until it is added."""
        self._end.send(b"p")
        _send(self._end, _address(self._memory), update)
        assert self._end.recv(1) == b"d"

    def pull(self, target: FlatBuffer) -> None:
        """Until all of it is here."""
        self._end.send(b"g")
        _receive(self._end, _address(self._memory), target, is_checked=False)
