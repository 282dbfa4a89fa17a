"""Signals while a run is followed."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from hetpipe.runs.interrupts import Interrupts


def test_before_listening_a_signal_raises_and_then_it_is_heard() -> None:
    heard: list[signal.Signals] = []
    before = signal.getsignal(signal.SIGUSR1)
    with Interrupts([signal.SIGUSR1]) as interrupts:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGUSR1)
        interrupts.listen(heard.append)
        os.kill(os.getpid(), signal.SIGUSR1)
        interrupts.listen(None)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]
    assert interrupts.count == 3
    assert signal.getsignal(signal.SIGUSR1) == before


def test_other_threads_take_no_signals() -> None:
    before = signal.getsignal(signal.SIGUSR1)

    def use() -> None:
        with Interrupts([signal.SIGUSR1]):
            assert signal.getsignal(signal.SIGUSR1) == before

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
