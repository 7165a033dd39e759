"""Log-probabilities and gradients of Qwen3.5 in every layout equal those of transformers."""

from __future__ import annotations

import pytest
import torch

from tests.model import tiny
from tests.model.layout_results import Examined, References, compare_gradients, examine_once, write_references
from tests.model.qwen3_5 import layout_ranks, small


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """Folder of the models, and results of transformers by model."""
    return write_references(tmp_path_factory.mktemp("qwen3_5"), small.MODELS, small.write_model, small.samples)


@pytest.fixture(scope="module")
def examined(references: References) -> Examined:
    """(ranks, case, model) -> results of each rank."""
    return examine_once(layout_ranks.run, references[0])


def check(examined: Examined, references: References, ranks: int, case: str, model: str) -> None:
    """Compare a layout's log-probabilities and gradients with those of transformers."""
    expected, everyone = references[1][model], examined(ranks, case, model)
    seen = set()
    for found in everyone:
        for name, result in found["rows"].items():
            seen.add(name)
            logits, targets = expected["logits"][name], small.samples()[name]
            assert logits.std() > 0.3, "logits near zero would make the comparison empty"
            logprobs = (logits / tiny.TEMPERATURE).log_softmax(dim=-1)
            logprobs = logprobs.gather(1, targets.tokens[targets.prompt :, None])[:, 0]
            # Relative: transformers' own float32 is up to 8e-6 from its float64, where log-probabilities are about -8.
            torch.testing.assert_close(result["logprobs"], logprobs, atol=1e-5, rtol=1e-6)
    assert seen == small.samples().keys()
    compare_gradients(everyone[0]["gradients"], expected["gradients"])


@pytest.mark.parametrize(("ranks", "case", "model"), layout_ranks.pairs(1))
def test_a_rank_computes_what_transformers_computes(
    examined: Examined, references: References, ranks: int, case: str, model: str
) -> None:
    check(examined, references, ranks, case, model)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "case", "model"), layout_ranks.pairs(2, 4))
def test_a_layout_computes_what_transformers_computes(
    examined: Examined, references: References, ranks: int, case: str, model: str
) -> None:
    check(examined, references, ranks, case, model)


@pytest.mark.parametrize("model", small.MODELS)
def test_packed_samples_do_not_see_each_other(examined: Examined, references: References, model: str) -> None:
    [found] = examined(1, "tp1", model)
    expected = torch.cat(list(references[1][model]["logits"].values()))
    torch.testing.assert_close(found["packed"][:, : tiny.VOCABULARY], expected, atol=1e-4, rtol=0)
    first = len(references[1][model]["logits"]["text"])
    assert (found["packed"][:first] - found["beside"][:first]).abs().max() > 0.1
    assert torch.equal(found["packed"][first:], found["beside"][first:])


def test_a_common_prefix_is_refused_by_name(examined: Examined) -> None:
    assert "trainer.merge_prefixes=trajectory" in examined(1, "tp1", "dense")[0]["refusal"]
