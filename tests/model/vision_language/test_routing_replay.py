"""Given experts replace the router's choice, and its weights and gradients remain those of the given experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_webrl.model.vision_language.packed_input import NOT_RECORDED, pad_to_multiple
from tests.gloo import spawn
from tests.model import tiny
from tests.model.vision_language import replay_ranks

Examined = Callable[[int, str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, torch.Tensor]]:
    """Folder of the model; logits by sample and gradients of transformers whose tokens go to the given experts."""
    folder = tmp_path_factory.mktemp("replay")
    model = tiny.write_model(folder / "moe", replay_ranks.SHAPE, 3)
    parts, experts, logits = tiny.samples(), replay_ranks.given_experts(), {}
    weights = tiny.token_weights(sum(len(s.tokens) - s.prompt for s in parts.values()))
    first = 0
    for name, sample in parts.items():
        with _forced(model, experts[name]):
            logits[name] = tiny.reference_logits(model, sample)
        scaled = (logits[name] / tiny.TEMPERATURE).log_softmax(dim=-1)
        logprobs = scaled.gather(1, sample.tokens[sample.prompt :, None]).squeeze(1)
        (logprobs * weights[first : first + len(logprobs)]).sum().backward()
        first += len(logprobs)
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    return folder, {name: each.detach() for name, each in logits.items()}, gradients


@contextmanager
def _forced(model: Any, experts: torch.Tensor) -> Iterator[None]:
    """Let transformers' routers return the given experts with their renormalised probabilities."""
    gates = [model.model.language_model.layers[layer].mlp.gate for layer in replay_ranks.SPARSE]
    hooks = []
    for gate, chosen in zip(gates, experts.long().unbind(1), strict=True):

        def force(_: Any, __: Any, output: Any, chosen: torch.Tensor = chosen) -> tuple[torch.Tensor, ...]:
            logits = output[0]
            weights = logits.softmax(dim=-1).gather(1, chosen)
            return logits, weights / weights.sum(dim=-1, keepdim=True), chosen

        hooks.append(gate.register_forward_hook(force))
    yield
    for hook in hooks:
        hook.remove()


@pytest.fixture(scope="module")
def examined(reference: tuple[Path, Any, Any]) -> Examined:
    """(ranks, case) -> results of each rank."""
    folder, done = reference[0], set()

    def found(ranks: int, case: str) -> list[dict[str, Any]]:
        if ranks not in done:
            spawn(replay_ranks.run, ranks, str(folder), ranks=ranks)
            done.add(ranks)
        everyone: list[dict[str, Any]] = torch.load(folder / f"replay-{ranks}-{case}.pt")
        return everyone

    return found


@pytest.mark.parametrize(
    ("ranks", "case"), [(ranks, case) for ranks, cases in replay_ranks.CASES.items() for case in cases]
)
def test_given_experts_compute_what_transformers_computes_with_them(
    examined: Examined, reference: tuple[Path, dict[str, Any], dict[str, torch.Tensor]], ranks: int, case: str
) -> None:
    """Logits and gradients, the routers' included, in layouts that shard tokens, experts and layers."""
    _, logits, gradients = reference
    everyone = examined(ranks, case)
    unseen = {name: torch.ones(len(each), dtype=torch.bool) for name, each in logits.items()}
    for found in everyone:
        for name, result in found["rows"].items():
            unseen[name] &= ~result["mask"]
            torch.testing.assert_close(result["logits"], logits[name][result["mask"]], atol=1e-4, rtol=0)
    assert not any(left.any() for left in unseen.values())
    assert everyone[0]["gradients"].keys() == gradients.keys()
    for key, found in everyone[0]["gradients"].items():
        wanted = gradients[key].mT if "experts" in key else gradients[key]
        assert wanted.norm() > 1e-6, f"{key}: the expected gradient is zero, the comparison would be empty"
        assert (found - wanted).norm() < 1e-3 * wanted.norm(), key


@pytest.mark.parametrize("case", replay_ranks.CASES[1])
def test_the_routers_own_experts_change_no_bit(examined: Examined, reference: tuple[Path, Any, Any], case: str) -> None:
    """Neither those of all tokens, nor of every other one; and the given random ones do change the logits."""
    [replayed] = examined(1, case)
    free, own, half = torch.load(reference[0] / f"own-{case}.pt")
    for found in (own, half):
        for name, row in free["rows"].items():
            assert torch.equal(found["rows"][name]["logits"], row["logits"])
        for key, gradient in free["gradients"].items():
            assert torch.equal(found["gradients"][key], gradient), key
    assert (replayed["rows"]["text"]["logits"] - free["rows"]["text"]["logits"]).abs().max() > 0.1


def test_padding_has_no_experts() -> None:
    sample = tiny.samples()["text"]
    packed = replace(tiny.pack([sample])[0], experts=replay_ranks.given_experts()["text"])
    padded = pad_to_multiple(packed, 8).experts
    assert padded is not None
    assert packed.experts is not None
    assert padded.shape == (32, 3, 2)
    assert torch.equal(padded[:26], packed.experts)
    assert (padded[26:] == NOT_RECORDED).all()
