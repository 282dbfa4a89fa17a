"""Runs whose files need not outlive the machine."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took a tenth of the time of these runs, by samples."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
