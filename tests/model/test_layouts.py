"""Logits, log-probabilities and gradients of every layout equal those of transformers."""

from __future__ import annotations

import pytest
import torch

from tests.model import layout_ranks, tiny
from tests.model.layout_results import Examined, References, compare_gradients, examine_once, write_references


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """Folder of the models, and results of transformers by model."""
    return write_references(tmp_path_factory.mktemp("layouts"), layout_ranks.MODELS, tiny.write_model, tiny.samples)


@pytest.fixture(scope="module")
def examined(references: References) -> Examined:
    """(ranks, case, model) -> results of each rank."""
    return examine_once(layout_ranks.run, references[0])


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "case", "model"), layout_ranks.pairs())
def test_a_layout_computes_what_transformers_computes(
    examined: Examined, references: References, ranks: int, case: str, model: str
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
    # transformers keeps experts transposed against the released form.
    gradients = {key: each.mT if "experts" in key else each for key, each in expected["gradients"].items()}
    compare_gradients(everyone[0]["gradients"], gradients)
