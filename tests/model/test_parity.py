"""The Megatron model equals transformers at tensor-parallel sizes 1 and 2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model import ranks, tiny

SIZES = pytest.mark.parametrize("size", [1, 2])
MODELS = pytest.mark.parametrize("name", list(ranks.MODELS))
CASES = {"text": ["text"], "image": ["image"], "images": ["images"], "packed": ["text", "image", "images"]}

Found = dict[tuple[int, int], dict[str, Any]]


def _expected(model: Any, names: list[str]) -> tuple[Tensor, Tensor]:
    """transformers' logits [R, V] of these samples, and the targets [R]."""
    parts = [tiny.samples()[name] for name in names]
    with torch.no_grad():
        logits = torch.cat([tiny.reference_logits(model, part) for part in parts])
    return logits, torch.cat([part.tokens[part.prompt :] for part in parts])


@SIZES
@MODELS
@pytest.mark.parametrize("case", list(CASES))
def test_logits_and_logprobs_equal_those_of_transformers(
    found: Found, references: dict[str, Any], size: int, name: str, case: str
) -> None:
    logits, targets = _expected(references[name], CASES[case])
    assert logits.std() > 0.3, "logits near zero would make the comparison empty"
    scaled = (logits / tiny.TEMPERATURE).log_softmax(dim=-1)
    for rank in (0, 1):
        result = found[size, rank][name][case]
        assert result["width"] == (tiny.VOCABULARY if size == 1 else (tiny.VOCABULARY + 1) // 2)
        torch.testing.assert_close(result["logits"], logits, atol=1e-4, rtol=0)
        torch.testing.assert_close(result["logprobs"], scaled.gather(1, targets[:, None])[:, 0], atol=1e-4, rtol=0)
        torch.testing.assert_close(result["entropy"], -(scaled.exp() * scaled).sum(dim=1), atol=1e-4, rtol=0)


@SIZES
@MODELS
def test_packed_samples_equal_the_same_samples_one_by_one(found: Found, size: int, name: str) -> None:
    results = found[size, 0][name]
    alone = torch.cat([results[case]["logits"] for case in CASES["packed"]])
    torch.testing.assert_close(results["packed"]["logits"], alone, atol=1e-5, rtol=0)


@SIZES
@MODELS
def test_an_image_given_once_is_used_for_all_its_occurrences(found: Found, size: int, name: str) -> None:
    results = found[size, 0][name]
    torch.testing.assert_close(results["shared"]["logits"], results["twice"]["logits"], atol=1e-5, rtol=0)


@MODELS
def test_image_features_change_the_logits(references: dict[str, Any], found: Found, name: str) -> None:
    """Guards the cases above: other pixels must give other logits, by far more than the tolerance."""
    results = found[1, 0][name]
    assert (results["other pixels"]["logits"] - results["image"]["logits"]).abs().max() > 0.05


@MODELS
def test_gradients_equal_those_of_transformers(found: Found, references: dict[str, Any], name: str) -> None:
    model = references[name]
    model.zero_grad()
    tiny.reference_loss(model, list(tiny.samples().values())).backward()
    expected = {key: parameter.grad for key, parameter in model.named_parameters()}
    gradients = found[2, 0][name]["gradients"]
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        _assert_close_by_norm(gradient, expected[key], 1e-3, key)


@MODELS
def test_both_ranks_hold_the_same_gradients_of_replicated_parameters(found: Found, name: str) -> None:
    first, second = (found[2, rank][name]["replicated"] for rank in (0, 1))
    assert any(key.startswith("visual.") for key in first)
    assert any("q_layernorm" in key for key in first)
    for key, gradient in first.items():
        assert torch.equal(gradient, second[key]), key


@SIZES
@MODELS
def test_an_optimiser_step_equals_one_in_transformers(
    found: Found, references: dict[str, Any], folder: Any, size: int, name: str
) -> None:
    """Tensor-parallel size 2 packs all samples into one input; size 1 divides them over two replicas."""
    model = type(references[name]).from_pretrained(folder / name)
    optimizer = torch.optim.Adam(model.parameters(), lr=ranks.LEARNING_RATE, eps=ranks.EPSILON)
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    tiny.reference_loss(model, list(tiny.samples().values())).backward()
    optimizer.step()
    for rank in (0, 1):
        for key, tensor in found[size, rank][name]["stepped"].items():
            expected = dict(model.named_parameters())[key].detach()
            _assert_close_by_norm(tensor - before[key], expected - before[key], 2e-3, key)


@SIZES
def test_bfloat16_stays_near_transformers_in_bfloat16(
    found: Found, references: dict[str, Any], folder: Any, size: int
) -> None:
    exact, _ = _expected(references["untied"], CASES["packed"])
    model = type(references["untied"]).from_pretrained(folder / "untied", dtype=torch.bfloat16)
    logits, _ = _expected(model, CASES["packed"])
    rounding = (logits.float() - exact).std()
    result = found[size, 0]["bf16"]["logits"]
    assert result.dtype is torch.bfloat16
    assert (result.float() - exact).std() < 1.5 * rounding


def _assert_close_by_norm(found: Tensor, expected: Tensor, limit: float, key: str) -> None:
    """The difference is under `limit` of the expected tensor's norm."""
    scale = expected.norm()
    assert scale > 1e-6, f"{key}: the expected tensor is zero, the comparison would be empty"
    error = ((found - expected).norm() / scale).item()
    assert error < limit, f"{key}: relative error {error:.2e}"


@pytest.mark.parametrize("name", list(ranks.MODELS))
def test_a_placeholder_token_in_a_response_is_text(found: Found, name: str) -> None:
    placeholder, twin = found[1, 0][name]["twins"]
    assert torch.equal(placeholder, twin)


@SIZES
def test_inconsistent_inputs_are_refused(found: Found, size: int) -> None:
    tokens = sum(len(sample.tokens) for sample in tiny.samples().values())
    first, second, third = found[size, 0]["tied"]["refusals"]
    assert "must rise from 0" in first
    assert f"to the number of tokens, {tokens}" in second
    assert "the packed input has 27 placeholders (token 99), but its 3 images make 15 image tokens" in third


def test_a_frozen_vision_tower_takes_no_gradient(found: Found) -> None:
    trained = found[1, 0]["bf16"]["trained"]
    assert trained
    assert not any(key.startswith("visual.") for key in trained)
