"""Fixtures of all tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """One thread per operation: sums that must agree bit for bit are then added in one order."""
    torch.set_num_threads(1)
