"""Packed samples, bfloat16, recomputation and refused inputs, of one rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.model import tiny
from tests.model.qwen3_5 import small
from tests.trainer.ranks import process_groups, results

MODELS = {"dense": tiny.Shape(deepstack=(0, 1)), "hybrid": small.MODELS["sparse"]}


def examine(platform: Any, _: Path, folder: Path) -> dict[str, Any]:
    from megatron_webrl.model.build import build_model, load_hf
    from megatron_webrl.model.compute_options import ComputeOptions
    from megatron_webrl.model.layout import ParallelSizes

    def build(name: str, dtype: str = "float32", **options: Any) -> Any:
        [model] = build_model(folder / name, dtype=dtype, platform=platform, options=ComputeOptions(**options))
        load_hf([model], folder / name)
        return model

    with process_groups(ParallelSizes()):
        found = {name: _forwards(build(name), _rows(name)) for name in ("dense", "hybrid")}
        frozen = build("dense", "bfloat16", train_vision=False)
        found["bf16"] = _forwards(frozen, {"packed": _rows("dense")["packed"]})
        found["trained"] = [name for name, p in frozen.named_parameters() if p.requires_grad]
        found["saved"] = [_saved(build("dense", recompute=recompute).train()) for recompute in ("none", "full")]
        return found | {"twins": _twins(build("dense"))}


def _samples(name: str) -> dict[str, tiny.Sample]:
    return small.samples() if name == "hybrid" else tiny.samples()


def _rows(name: str) -> dict[str, Any]:
    """Inputs by case, broken ones among them."""
    parts = _samples(name)
    row = tiny.pack(list(parts.values()))[0]
    if name == "hybrid":
        tokens, first = row.tokens.clone(), int(row.cu_seqlens[1])
        tokens[:first] = (tokens[:first] + 1) % tiny.VISION_START
        prefix = replace(row, parents=torch.tensor([-1, 0, -1, -1]))
        return {"packed": row, "other neighbour": replace(row, tokens=tokens), "prefix": prefix}
    return {
        "packed": row,
        "too few tokens": replace(row, cu_seqlens=row.cu_seqlens[:-1]),
        "falling": replace(row, cu_seqlens=row.cu_seqlens[[0, 2, 1, 3]]),
        "too few images": replace(row, grids=row.grids[:-1], pixels=row.pixels[: -int(row.grids[-1].prod())]),
    }


def _forwards(model: Any, rows: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case, row in rows.items():
        try:
            with torch.no_grad():
                found[case] = model(row)[:, : tiny.VOCABULARY]
        except ValueError as error:
            found[case] = str(error)
    return found


def _twins(model: Any) -> list[Tensor]:
    """Logits with the placeholder token within a response, and with another token of the same embedding."""
    sample, logits = tiny.samples()["image"], []
    row, _ = tiny.pack([sample])
    visual = (sample.tokens[: sample.prompt] == tiny.IMAGE).nonzero().squeeze(1)
    with torch.no_grad():
        weight = model.embedding.word_embeddings.weight
        weight[0] = weight[tiny.IMAGE]
        for token in (tiny.IMAGE, 0):
            tokens = sample.tokens.clone()
            tokens[sample.prompt + 2] = token
            logits.append(model(replace(row, tokens=tokens, image_token_positions=visual)))
    return logits


def _saved(model: Any) -> int:
    """Bytes saved for the backward pass, each storage counted once, without weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}  # so that no address is reused
    row, _ = tiny.pack([tiny.samples()["text"]] * 8)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.setdefault(x.untyped_storage().data_ptr(), x), lambda x: x
    ):
        model(row)
    return sum(x.untyped_storage().nbytes() for address, x in kept.items() if address not in weights)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("parity")
    return folder, {name: tiny.write_model(folder / name, shape, 0) for name, shape in MODELS.items()}


@pytest.fixture(scope="module")
def found(references: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    return results(examine, references[0] / "found", references[0], ranks=1)[0]


def expected(model: Any, name: str) -> Tensor:
    """transformers' logits of all samples, one by one."""
    with torch.no_grad():
        return torch.cat([tiny.reference_logits(model, sample) for sample in _samples(name).values()])


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_packed_samples_equal_those_of_transformers_one_by_one(
    found: dict[str, Any], references: tuple[Path, dict[str, Any]], name: str
) -> None:
    logits = expected(references[1][name], name)
    assert logits.std() > 0.3, "logits near zero would make the comparison empty"
    torch.testing.assert_close(found[name]["packed"], logits, atol=1e-4, rtol=0)


def test_samples_of_linear_attention_do_not_see_their_neighbours(found: dict[str, Any]) -> None:
    packed, other = found["hybrid"]["packed"], found["hybrid"]["other neighbour"]
    sample = tiny.samples()["text"]
    first = len(sample.tokens) - sample.prompt
    assert (packed[:first] - other[:first]).abs().max() > 0.1
    assert torch.equal(packed[first:], other[first:])


def test_a_placeholder_token_in_a_response_is_text(found: dict[str, Any]) -> None:
    placeholder, twin = found["twins"]
    assert torch.equal(placeholder, twin)


def test_inconsistent_inputs_are_refused(found: dict[str, Any]) -> None:
    tokens = sum(len(sample.tokens) for sample in tiny.samples().values())
    for name, case, words in (
        ("dense", "too few tokens", f"to the number of tokens, {tokens}"),
        ("dense", "falling", "must rise from 0"),
        ("dense", "too few images", "27 placeholders (token 99), but its 3 images make 15 image tokens"),
        ("hybrid", "prefix", "trainer.merge_prefixes=trajectory"),
    ):
        assert words in found[name][case]


def test_bfloat16_stays_near_transformers_in_bfloat16_with_a_frozen_vision_tower(
    found: dict[str, Any], references: tuple[Path, dict[str, Any]]
) -> None:
    folder, models = references
    exact = expected(models["dense"], "dense")
    model = type(models["dense"]).from_pretrained(folder / "dense", dtype=torch.bfloat16)
    rounding = (expected(model, "dense").float() - exact).std()
    result = found["bf16"]["packed"]
    assert result.dtype is torch.bfloat16
    assert (result.float() - exact).std() < 1.5 * rounding
    assert found["trained"]
    assert not any(name.startswith("visual.") for name in found["trained"])


def test_full_recomputation_keeps_little_for_the_backward_pass(found: dict[str, Any]) -> None:
    none, full = found["saved"]
    assert full < 0.4 * none
