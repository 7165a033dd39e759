"""Section "one GPU" where transformers itself cannot compute; the other tests of it run the whole command."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_webrl.checks import gpu_model
from megatron_webrl.checks.gpu import GpuCheckRequest
from megatron_webrl.config.schema import Config


def test_a_reference_that_fails_is_a_line_for_each_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("Triton 3.6 produces incorrect results\non this GPU")

    platform = SimpleNamespace(name="cpu", device=torch.device("cpu"))
    monkeypatch.setattr(gpu_model, "start_process_groups", lambda name: platform)
    monkeypatch.setattr(gpu_model, "_expected", refuse)
    results = list(gpu_model.check(GpuCheckRequest(Config(), "cpu")))
    assert [(each.name, each.status) for each in results] == [
        (f"{kind}, float32, transformers", "failed") for kind in gpu_model.MODELS
    ]
    assert {each.note for each in results} == {"RuntimeError: Triton 3.6 produces incorrect results"}
