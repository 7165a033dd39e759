"""Fixtures of the tests of rollout workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_webrl.model.processor import Processor


@pytest.fixture(scope="session")
def processor(tiny_model: Path) -> Processor:
    return Processor.load(tiny_model)
