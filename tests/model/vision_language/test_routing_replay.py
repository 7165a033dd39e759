"""Given experts replace the router's choice, and its weights and gradients remain those of the given experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_webrl.model.vision_language.packed_input import NOT_RECORDED, pad_to_multiple
from tests.model import tiny
from tests.model.layout_ranks import MODELS, Case, examine
from tests.model.test_layouts import check
from tests.trainer.ranks import process_groups, results

SHAPE = MODELS["sparse"]
SPARSE = (0, 2, 3)
TOP_K = 2
CASES: dict[int, list[Case]] = {
    1: [Case({}), Case({}, recompute="full")],
    2: [
        Case({"pipeline": 2, "virtual": 2}, recompute="full"),
        Case({"context": 2}),
        Case({"tensor": 2, "expert": 2}, recompute="selective"),
    ],
}


def given_experts() -> dict[str, Tensor]:
    """Random experts of each sample's tokens but every third one, int16 [tokens, MoE layers, top_k]."""
    generator, found = torch.Generator().manual_seed(11), {}
    for name, sample in tiny.samples().items():
        order = torch.rand(len(sample.tokens), len(SPARSE), SHAPE.experts, generator=generator).argsort(dim=-1)
        found[name] = order[..., :TOP_K].short()
        found[name][::3] = NOT_RECORDED
    return found


def replay(platform: Any, _: Path, model: Path) -> list[dict[str, Any]]:
    from megatron_webrl.model.layout import ParallelSizes

    found = []
    for case in CASES[torch.distributed.get_world_size()]:
        with process_groups(ParallelSizes(**case.sizes)):
            found.append(examine(model, case, platform, tiny.samples(), given_experts()))
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """Folder of the model; logits by sample and gradients of transformers whose tokens go to the given experts."""
    folder = tmp_path_factory.mktemp("replay")
    model = tiny.write_model(folder / "moe", SHAPE, 3)
    parts, experts, logits = tiny.samples(), given_experts(), {}
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
def _forced(model: Any, experts: Tensor) -> Iterator[None]:
    """Let transformers' routers return the given experts, or else their own, with renormalised probabilities."""
    gates = [model.model.language_model.layers[layer].mlp.gate for layer in SPARSE]
    hooks = []
    for gate, chosen in zip(gates, experts.long().unbind(1), strict=True):

        def force(_: Any, __: Any, output: Any, chosen: Tensor = chosen) -> tuple[Tensor, ...]:
            logits, _, own = output
            chosen = torch.where(chosen == NOT_RECORDED, own, chosen)
            weights = logits.softmax(dim=-1).gather(1, chosen)
            return logits, weights / weights.sum(dim=-1, keepdim=True), chosen

        hooks.append(gate.register_forward_hook(force))
    yield
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("ranks", CASES)
def test_given_experts_compute_what_transformers_computes_with_them(
    reference: tuple[Path, dict[str, Tensor], dict[str, Tensor]], tmp_path: Path, ranks: int
) -> None:
    for everyone in zip(*results(replay, tmp_path, reference[0] / "moe", ranks=ranks), strict=True):
        check("sparse", everyone, *reference[1:])


def test_padding_has_no_experts() -> None:
    sample = tiny.samples()["text"]
    packed = replace(tiny.pack([sample])[0], experts=given_experts()["text"])
    padded = pad_to_multiple(packed, 8).experts
    assert padded is not None
    assert packed.experts is not None
    assert padded.shape == (32, 3, 2)
    assert torch.equal(padded[:26], packed.experts)
    assert (padded[26:] == NOT_RECORDED).all()
