"""Logits, log-probabilities and gradients of every layout equal those of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.model import layout_ranks, tiny
from tests.model.layout_ranks import GROUPS, MODELS, samples
from tests.trainer.ranks import results

Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Folder of the models, and logits by sample and gradients of transformers by model."""
    folder, found = tmp_path_factory.mktemp("layouts"), {}
    for seed, (name, shape) in enumerate(MODELS.items()):
        model, parts = tiny.write_model(folder / name, shape, seed), samples(name)
        tiny.reference_loss(model, list(parts.values())).backward()
        with torch.no_grad():
            logits = {key: tiny.reference_logits(model, sample) for key, sample in parts.items()}
        assert min(each.std() for each in logits.values()) > 0.3, "logits near zero would make comparisons empty"
        found[name] = {"logits": logits, "gradients": {key: p.grad for key, p in model.named_parameters()}}
    return folder, found


@pytest.mark.parametrize(
    "group", [pytest.param(name, marks=[pytest.mark.slow] * name.startswith("more")) for name in GROUPS]
)
def test_a_layout_computes_what_transformers_computes(
    references: tuple[Path, dict[str, dict[str, Any]]], tmp_path: Path, group: str
) -> None:
    folder, expected = references
    ranks = results(layout_ranks.run, tmp_path, folder, group, ranks=GROUPS[group][0], seconds=600.0)
    assert len(ranks[0]) == sum(len(case.models) for case in GROUPS[group][1])
    for number, model in ranks[0]:
        everyone = [found[number, model] for found in ranks]
        check(model, everyone, expected[model]["logits"], expected[model]["gradients"])


def check(model: str, everyone: Sequence[dict[str, Any]], wanted: Tensors, gradients: Tensors) -> None:
    # transformers' own float32 is up to 8e-6 from its float64, where log-probabilities are about -8.
    exact = {"atol": 1e-5, "rtol": 1e-6} if MODELS[model].is_linear else {"atol": 1e-4, "rtol": 0}
    unseen = {name: torch.ones(len(logits), dtype=torch.bool) for name, logits in wanted.items()}
    for found in everyone:
        for name, result in found["rows"].items():
            mask, sample, logits = result["mask"], samples(model)[name], wanted[name]
            unseen[name] &= ~mask
            torch.testing.assert_close(result["logits"], logits[mask], atol=1e-4, rtol=0)
            scaled = (logits / tiny.TEMPERATURE).log_softmax(dim=-1)
            logprobs = scaled.gather(1, sample.tokens[sample.prompt :, None])[:, 0]
            torch.testing.assert_close(result["logprobs"], logprobs[mask], **exact)
            entropy = -(scaled.exp() * scaled).sum(dim=1)
            torch.testing.assert_close(result["entropy"], entropy[mask], atol=1e-4, rtol=0)
    assert not any(left.any() for left in unseen.values())
    assert everyone[0]["gradients"].keys() == gradients.keys()
    for key, found in everyone[0]["gradients"].items():
        # transformers keeps experts of Qwen3-VL transposed against the released form.
        transposed = ".experts." in key and not MODELS[model].is_linear
        expected = gradients[key].mT if transposed else gradients[key]
        assert expected.norm() > 1e-6, f"{key}: the expected gradient is zero, the comparison would be empty"
        error = ((found - expected).norm() / expected.norm()).item()
        assert error < 1e-3, f"{key}: relative error {error:.2e}"
