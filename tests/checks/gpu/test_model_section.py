"""Section "one GPU" where transformers itself cannot compute; the other tests of it run the whole command."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_webrl.checks.gpu import model_section
from megatron_webrl.checks.gpu.request import GpuCheckRequest
from megatron_webrl.config.schema import Config


def test_a_reference_that_fails_is_a_line_for_each_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("Triton 3.6 produces incorrect results\non this GPU")

    platform = SimpleNamespace(name="cpu", device=torch.device("cpu"))
    monkeypatch.setattr(model_section, "start_process_groups", lambda name: platform)
    monkeypatch.setattr(model_section, "_expected", refuse)
    results = list(model_section.check(GpuCheckRequest(Config(), "cpu")))
    assert [(each.name, each.status) for each in results] == [
        (f"{kind}, float32, transformers", "failed") for kind in model_section.MODELS
    ]
    assert {each.note for each in results} == {"RuntimeError: Triton 3.6 produces incorrect results"}
