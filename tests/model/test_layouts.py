"""Logits, log-probabilities and gradients of every layout equal those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gloo import spawn
from tests.model import layout_ranks, tiny

Examined = Callable[[int, str, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Folder of the models, and results of transformers by model."""
    folder = tmp_path_factory.mktemp("layouts")
    found = {}
    for seed, (name, shape) in enumerate(layout_ranks.MODELS.items()):
        model = tiny.write_model(folder / name, shape, seed)
        parts = tiny.samples()
        tiny.reference_loss(model, list(parts.values())).backward()
        with torch.no_grad():
            logits = {key: tiny.reference_logits(model, sample) for key, sample in parts.items()}
        gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
        found[name] = {"logits": logits, "gradients": gradients}
    return folder, found


@pytest.fixture(scope="module")
def examined(references: tuple[Path, dict[str, Any]]) -> Examined:
    """(ranks, case, model) -> results of each rank."""
    folder, _ = references
    done: set[int] = set()

    def found(ranks: int, case: str, model: str) -> list[dict[str, Any]]:
        if ranks not in done:
            spawn(layout_ranks.run, ranks, str(folder), ranks=ranks, seconds=600)
            done.add(ranks)
        everyone: list[dict[str, Any]] = torch.load(folder / f"found-{ranks}-{case}-{model}.pt")
        return everyone

    return found


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "case", "model"), layout_ranks.pairs())
def test_a_layout_computes_what_transformers_computes(
    examined: Examined, references: tuple[Path, dict[str, Any]], ranks: int, case: str, model: str
) -> None:
    expected, everyone = references[1][model], examined(ranks, case, model)
    unseen = {name: torch.ones(len(logits), dtype=torch.bool) for name, logits in expected["logits"].items()}
    for found in everyone:
        for name, result in found["rows"].items():
            mask, sample = result["mask"], tiny.samples()[name]
            unseen[name] &= ~mask
            logits = expected["logits"][name]
            assert logits.std() > 0.3, "logits near zero would make the comparison empty"
            torch.testing.assert_close(result["logits"], logits[mask], atol=1e-4, rtol=0)
            scaled = (logits / tiny.TEMPERATURE).log_softmax(dim=-1)
            logprobs = scaled.gather(1, sample.tokens[sample.prompt :, None])[:, 0]
            torch.testing.assert_close(result["logprobs"], logprobs[mask], atol=1e-4, rtol=0)
            entropy = -(scaled.exp() * scaled).sum(dim=1)
            torch.testing.assert_close(result["entropy"], entropy[mask], atol=1e-4, rtol=0)
    assert not any(left.any() for left in unseen.values())
    _compare_gradients(everyone[0]["gradients"], expected["gradients"])


def _compare_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        wanted = expected[key]
        # transformers keeps experts transposed against the released form.
        wanted = wanted.mT if "experts" in key else wanted
        assert wanted.norm() > 1e-6, f"{key}: the expected gradient is zero, the comparison would be empty"
        error = ((gradient - wanted).norm() / wanted.norm()).item()
        assert error < 1e-3, f"{key}: relative error {error:.2e}"
