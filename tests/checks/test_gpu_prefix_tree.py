"""The section "one GPU" with a prefix tree: right kernels pass, and a kernel that masks otherwise is found."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from megatron_webrl.checks import oracles
from megatron_webrl.checks.gpu_model import MIN_SHARED_TOKENS
from megatron_webrl.checks.gpu_speed import CPU, GROUP, not_slower
from megatron_webrl.trainer.data.prefix_merging import MIN_SHARED_TOKENS as TRAINERS_MINIMUM
from tests.checks import tree_ranks
from tests.gloo import spawn


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Results by kernel."""
    folder = tmp_path_factory.mktemp("tree")
    spawn(tree_ranks.run, str(folder), ranks=1)
    results: dict[str, list[dict[str, Any]]] = json.loads((folder / "found.json").read_text())
    return results


@pytest.mark.parametrize("kernel", ["sdpa", "sdpa, bfloat16", "varlen, last"])
def test_a_right_kernel_computes_a_tree_as_well_as_separate_sequences(found: dict[str, Any], kernel: str) -> None:
    assert [each["name"].endswith(", prefix tree") for each in found[kernel]] == [False, False, True, True]
    assert {each["status"] for each in found[kernel]} == {"passed"}, found[kernel]


def test_a_kernel_that_aligns_its_mask_to_the_first_key_fails_with_a_tree_alone(found: dict[str, Any]) -> None:
    assert [each["status"] for each in found["varlen, first"]] == ["passed", "passed", "failed", "failed"]
    logits, gradients = found["varlen, first"][2:]
    assert logits["ratio"] > 100
    assert gradients["ratio"] > 100


def test_the_tree_of_the_samples_has_branches_of_branches_and_each_image_once() -> None:
    parts = oracles.branches()
    packed, targets = oracles.pack_tree(parts, MIN_SHARED_TOKENS)
    assert packed.parents is not None
    assert packed.parents.tolist() == [-1, -1, 0, 0, 0, 4, 4]
    assert len(packed.tokens) < 0.6 * sum(len(part.tokens) for part in parts)
    assert packed.grids.tolist() == [[1, 4, 6], [1, 2, 4], [1, 4, 4]]
    assert len(packed.scored_positions) > len(packed.scored_positions.unique())  # one scores two branches
    assert torch.equal(targets, oracles.pack(parts)[1])


def test_a_group_of_the_speed_section_is_long_enough_for_the_trainers_tree() -> None:
    group = CPU.group()
    assert [len(part.tokens) for part in group] == [CPU.tokens] * GROUP
    tree, _ = oracles.pack_tree(group, TRAINERS_MINIMUM)
    separate, _ = oracles.pack_tree(group, CPU.tokens + 1)
    assert len(separate.tokens) == GROUP * CPU.tokens
    assert len(tree.tokens) == CPU.tokens * 3 // 4 + GROUP * CPU.tokens // 4
    assert torch.equal(tree.pixels, separate.pixels)  # both encode the image once


def test_a_tree_that_is_slower_than_separate_sequences_fails_on_a_gpu() -> None:
    faster, slower = (
        not_slower("a tree", seconds, 1.0, "set trainer.merge_prefixes=trajectory", True) for seconds in (0.5, 1.1)
    )
    assert (faster.status, faster.ratio, faster.note) == ("passed", 0.5, "")
    assert slower.status == "failed"
    assert "set trainer.merge_prefixes=trajectory" in slower.note
    assert not_slower("a tree", 1.1, 1.0, "", False).status == "passed"
