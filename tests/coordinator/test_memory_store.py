"""The store in memory keeps the contract."""

from __future__ import annotations

import pytest

from hetpipe.coordinator.memory_store import MemoryStore
from hetpipe.coordinator.store import Store
from hetpipe.testing.fake_clock import FakeClock
from tests.coordinator.store_contract import Advance, StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def clock(self) -> FakeClock:
        return FakeClock()

    @pytest.fixture
    def store(self, clock: FakeClock) -> Store:
        return MemoryStore(clock)

    @pytest.fixture
    def advance(self, clock: FakeClock) -> Advance:
        return clock.advance
