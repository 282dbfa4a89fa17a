"""The least that a frame over shared memory costs in Python with a thread that reads: its copies, and who wakes whom.

As a link does, each process has a thread that waits for messages of 16 bytes, copies the bytes out of a slot into new
memory, says that the slot is free, and hands the copy to the thread that waits for it. Nothing is encoded, checked,
named or counted beyond that.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
from collections import deque
from contextlib import suppress

import torch

_SLOTS = 4
_SLOT_BYTES = 1 << 20
_MESSAGE = bytes(16)
_WAIT_SECONDS = 60.0


def pair() -> tuple[tuple[socket.socket, socket.socket, int], tuple[socket.socket, socket.socket, int]]:
    """What each of two processes makes its end of: sockets to send and to receive by, and the memory of both."""
    there, back = (socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    descriptor = os.memfd_create("hand-overs")
    os.ftruncate(descriptor, 2 * _SLOTS * _SLOT_BYTES)
    return (there[0], back[0], descriptor), (back[1], there[1], os.dup(descriptor))


class HandOvers:
    """One end."""

    def __init__(self, sends: socket.socket, receives: socket.socket, descriptor: int, *, is_first: bool) -> None:
        """Begin to receive; the first end sends through the first half of the memory."""
        self._sends, self._receives = sends, receives
        self._memory = mmap.mmap(descriptor, 2 * _SLOTS * _SLOT_BYTES)
        os.close(descriptor)
        halves = [ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) + i * _SLOTS * _SLOT_BYTES for i in (0, 1)]
        self._out, self._in = halves if is_first else reversed(halves)
        self._in_use = self._slot = 0
        self._arrived = threading.Condition()
        self._frames: deque[torch.Tensor] = deque()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def send(self, tensor: torch.Tensor) -> None:
        """Copy into a slot and announce it."""
        if self._in_use == _SLOTS:
            self._sends.recv(len(_MESSAGE))
            self._in_use -= 1
        ctypes.memmove(self._out + self._slot * _SLOT_BYTES, tensor.data_ptr(), tensor.nbytes)
        self._sends.send(tensor.nbytes.to_bytes(len(_MESSAGE), "little"))
        self._in_use, self._slot = self._in_use + 1, (self._slot + 1) % _SLOTS

    def receive(self) -> torch.Tensor:
        """Wait for the next copy."""
        with self._arrived:
            while not self._frames:
                self._arrived.wait(_WAIT_SECONDS)
            return self._frames.popleft()

    def close(self) -> None:
        """End both directions."""
        for each in (self._sends, self._receives):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def _read(self) -> None:
        slot = 0
        with suppress(OSError):
            while message := self._receives.recv(len(_MESSAGE)):
                tensor = torch.empty(int.from_bytes(message, "little"), dtype=torch.uint8)
                ctypes.memmove(tensor.data_ptr(), self._in + slot * _SLOT_BYTES, tensor.nbytes)
                self._receives.send(_MESSAGE)
                slot = (slot + 1) % _SLOTS
                with self._arrived:
                    self._frames.append(tensor)
                    self._arrived.notify()
