"""Chunks for small tests."""

import pytest

from safeops.head import _chunks


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Cut 40 rows into five chunks of seven and one of five."""
    monkeypatch.setattr(_chunks, "FEWEST", (7, 7))
    monkeypatch.setattr(_chunks, "CHUNK", 1)
