"""The store in memory keeps the contract."""

from __future__ import annotations

import pytest

from hetpipe.storage.memory_store import MemoryStore
from hetpipe.storage.store import Store
from tests.storage.store_contract import Advance, StoreContract
from tests.support.fake_clock import FakeClock


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
