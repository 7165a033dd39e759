"""A whole job for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.whole_jobs import Job


@pytest.fixture
def job(tmp_path: Path, tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    job = Job(tmp_path, tiny_model, name=f"t{os.getpid()}-{abs(hash(request.node.name)) % 10_000}")
    yield job
    job.close()
