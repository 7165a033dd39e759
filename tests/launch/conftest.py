"""A whole job and a checkpoint for the tests of this folder."""

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


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A checkpoint of the tiny model, which nobody changes."""
    from megatron_webrl.model.convert.conversion import ConversionOptions, hf_to_megatron
    from megatron_webrl.model.layout import ParallelSizes

    folder = tmp_path_factory.mktemp("checkpoint") / "version-000007"
    hf_to_megatron(tiny_model, folder, ParallelSizes(), ConversionOptions())
    (folder / "state.json").write_text('{"version": 7}')
    return folder
