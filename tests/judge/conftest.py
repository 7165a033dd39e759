"""Tests of the judge do not wait as long between two requests as a user's job does."""

from __future__ import annotations

import pytest
from openai import _base_client


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """openai's client has no setting for its pauses."""
    monkeypatch.setattr(_base_client, "INITIAL_RETRY_DELAY", 0.02)
    monkeypatch.setattr(_base_client, "MAX_RETRY_DELAY", 0.2)
