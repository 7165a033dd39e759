"""Log-probabilities over a split vocabulary equal torch's log_softmax, and so do their gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_webrl.model import logprobs as module
from megatron_webrl.model.logprobs import vocab_parallel_logprobs
from tests.model import tiny
from tests.trainer.ranks import results


def logprob_losses(logprobs: Tensor, entropy: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Losses of log-probabilities, of entropies and of both, by the name of their gradient at the logits."""
    of_logprobs, of_entropy = (logprobs * weights).sum(), (entropy * weights.flip(0)).sum()
    return {
        "gradient": of_logprobs,
        "gradient of entropy": of_entropy,
        "gradient of both": of_logprobs - 0.3 * of_entropy,
    }


def logprob_case() -> tuple[Tensor, Tensor, Tensor]:
    """Logits [50, 102] of large spread whose last column is padding, targets [50], weights [50]."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(50, tiny.VOCABULARY + 1, generator=generator) * 8
    logits[:, -1] = 1e4  # padding values must not matter
    return (logits, torch.randint(0, tiny.VOCABULARY, (50,), generator=generator), torch.randn(50, generator=generator))


def of_ranks(*_: Any) -> dict[str, Tensor]:
    return _found(torch.distributed.group.WORLD)


def _found(group: Any) -> dict[str, Tensor]:
    """Values and gradients of `vocab_parallel_logprobs`; `group` splits the vocabulary."""
    logits, targets, weights = logprob_case()
    mine = logits if group is None else logits.chunk(group.size(), dim=1)[group.rank()].clone()
    mine.requires_grad_()
    logprobs, entropy = vocab_parallel_logprobs(mine, targets, tiny.TEMPERATURE, tiny.VOCABULARY, group)
    found = {"logprobs": logprobs.detach(), "entropy": entropy.detach()}
    for name, loss in logprob_losses(logprobs, entropy, weights).items():
        (found[name],) = torch.autograd.grad(loss, mine, retain_graph=True)
        if group is not None:
            shards = [torch.empty_like(mine) for _ in range(group.size())]
            torch.distributed.all_gather(shards, found[name], group=group)
            found[name] = torch.cat(shards, dim=1)
    return found


def _expected() -> dict[str, Tensor]:
    logits, targets, weights = logprob_case()
    logits.requires_grad_()
    scaled = (logits[:, : tiny.VOCABULARY].double() / tiny.TEMPERATURE).log_softmax(dim=-1)
    logprobs = scaled.gather(1, targets[:, None])[:, 0]
    entropy = -(scaled.exp() * scaled).sum(dim=1)
    losses = logprob_losses(logprobs, entropy, weights)
    return {"logprobs": logprobs.detach().float(), "entropy": entropy.detach().float()} | {
        name: torch.autograd.grad(loss, logits, retain_graph=True)[0] for name, loss in losses.items()
    }


def _check(found: dict[str, Tensor]) -> None:
    expected = _expected()
    for key in found.keys() - {"logprobs"}:
        # The entropy's gradient multiplies with log-probabilities of rare tokens, which float32 resolves to 4e-6.
        tolerance = 4e-6 if "entropy" in key or "both" in key else 1e-6
        torch.testing.assert_close(found[key], expected[key], atol=tolerance, rtol=1e-5)
    # float32 resolves values near 40 to 4e-6.
    torch.testing.assert_close(found["logprobs"], expected["logprobs"], atol=1e-6, rtol=1e-6)


def test_values_and_gradients_equal_log_softmax_on_gloo_ranks(tmp_path: Path) -> None:
    for found in results(of_ranks, tmp_path):
        _check(found)


def test_without_a_loss_of_entropies_their_gradient_is_not_computed() -> None:
    """An infinite entropy term would make the gradient NaN."""
    logits = torch.tensor([[1.0, -torch.inf, 0.5]], requires_grad=True)
    logprobs, entropy = vocab_parallel_logprobs(logits, torch.tensor([0]), 1.0, 3, None)
    entropy.detach().sum()
    logprobs.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("rows", [1, 7, 50])
def test_chunking_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", rows * (tiny.VOCABULARY + 1))
    _check(_found(None))


def test_huge_logits_and_impossible_targets_stay_finite() -> None:
    logits = torch.tensor([[3e4, -3e4, 0.0], [-3e4, -3e4, -3e4]], requires_grad=True)
    logprobs, entropy = vocab_parallel_logprobs(logits, torch.tensor([1, 2]), 1.0, 3, None)
    (logprobs.sum() + entropy.sum()).backward()
    torch.testing.assert_close(logprobs.detach(), torch.tensor([-6e4, -torch.tensor(3.0).log().item()]))
    torch.testing.assert_close(entropy.detach(), torch.tensor([0.0, torch.tensor(3.0).log().item()]))
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_bfloat16_logits_are_computed_in_float32() -> None:
    logits, targets, _ = logprob_case()
    rounded = logits.bfloat16().requires_grad_()
    logprobs, _ = vocab_parallel_logprobs(rounded, targets, 1.0, tiny.VOCABULARY, None)
    wide, _ = vocab_parallel_logprobs(rounded.detach().float(), targets, 1.0, tiny.VOCABULARY, None)
    assert logprobs.dtype is torch.float32
    assert torch.equal(logprobs, wide)
    logprobs.sum().backward()
    assert rounded.grad is not None
    assert rounded.grad.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "temperature", "message"), [((4, 8), 1.0, r"targets \[3\]"), ((3, 8), 0.0, "temperature=0.0 must be")]
)
def test_invalid_arguments_are_refused(shape: tuple[int, int], temperature: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vocab_parallel_logprobs(torch.zeros(shape), torch.zeros(3, dtype=torch.int64), temperature, 8, None)
