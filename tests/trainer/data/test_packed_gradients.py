"""Log-probabilities and gradients do not depend on the packing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_webrl.model.processor import Processor
from megatron_webrl.trainer.data.batching import TrainingSample
from tests.gloo import spawn
from tests.trainer.data import packing_ranks

OTHERS = pytest.mark.parametrize("way", [name for name in packing_ranks.WAYS if name != "one by one"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The folder with the results of the process."""
    folder = tmp_path_factory.mktemp("packing")
    spawn(packing_ranks.run, str(folder), str(tiny_model), ranks=1)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, dict[str, Any]]:
    """Way of packing -> its results."""
    result: dict[str, dict[str, Any]] = torch.load(folder / "found.pt")
    return result


@OTHERS
def test_log_probabilities_are_those_of_samples_one_by_one(found: dict[str, dict[str, Any]], way: str) -> None:
    alone, other = found["one by one"], found[way]
    assert torch.equal(alone["marks"], other["marks"])
    assert len(alone["marks"]) == len(alone["marks"].unique())
    assert (alone["logprobs"] - other["logprobs"]).abs().max() < 1e-5


@OTHERS
def test_gradients_are_those_of_samples_one_by_one(found: dict[str, dict[str, Any]], way: str) -> None:
    alone, other = found["one by one"]["gradients"], found[way]["gradients"]
    assert alone.keys() == other.keys()
    assert any("visual" in name for name in alone)
    for name, gradient in alone.items():
        assert gradient.norm() > 0
        assert (gradient - other[name]).norm() < 1e-5 * gradient.norm(), name


def test_the_numbers_of_microbatches_are_as_requested(found: dict[str, dict[str, Any]]) -> None:
    assert {name: result["rows"] for name, result in found.items()} == {
        "one by one": [9],
        "packed": [3],
        "merged": [2],
        "merged, one row": [1],
        "merged, two replicas": [1, 1],
        "packed, three replicas of two rows": [2, 2, 2],
        "merged, more rows than samples": [4, 4],
    }


def test_merging_computes_shared_tokens_and_encodes_shared_images_once(
    found: dict[str, dict[str, Any]], tiny_model: Path
) -> None:
    samples = packing_ranks.make_samples(Processor.load(tiny_model))
    last = [samples[i] for i in (2, 4, 7, 8)]  # the last step of each episode, which contains the others
    alone, merged, together = (
        found[way] for way in ("one by one", "merged, more rows than samples", "merged, one row")
    )
    assert alone["tokens"] == sum(sample.length for sample in samples)
    assert merged["tokens"] == together["tokens"] == sum(sample.length for sample in last)
    assert alone["patches"] == sum(patches(sample) for sample in samples)
    assert merged["patches"] == sum(patches(sample) for sample in last)
    distinct = {image: grid for sample in last for image, grid in zip(sample.images, sample.grids, strict=True)}
    assert together["patches"] == sum(int(grid.prod()) for grid in distinct.values()) < merged["patches"]


def test_steps_of_the_append_policy_score_the_same_merged_into_segments(folder: Path, tiny_model: Path) -> None:
    found = torch.load(folder / "appended.pt")
    alone, merged = found["one by one"], found["merged"]
    samples = packing_ranks.appended_samples(Processor.load(tiny_model))
    assert (alone["rows"], merged["rows"]) == ([5], [1])
    assert alone["tokens"] == sum(sample.length for sample in samples)
    assert merged["tokens"] == samples[2].length + samples[4].length  # the last step of each segment
    assert merged["patches"] == sum(patches(samples[i]) for i in (2, 4))
    assert torch.equal(alone["marks"], merged["marks"])
    assert (alone["logprobs"] - merged["logprobs"]).abs().max() < 1e-5
    for name, gradient in alone["gradients"].items():
        assert (gradient - merged["gradients"][name]).norm() < 1e-5 * gradient.norm(), name


@pytest.mark.parametrize(("dtype", "limit", "each_limit"), [("float32", 1e-6, 1e-5), ("float64", 1e-12, 1e-6)])
def test_a_groups_common_prefix_is_computed_once_with_the_same_scores_and_gradients(
    folder: Path, tiny_model: Path, dtype: str, limit: float, each_limit: float
) -> None:
    """`limit`: relative, of log-probabilities; `each_limit`: of each gradient, whose norms are float32 in any case."""
    found = torch.load(folder / f"tree-{dtype}.pt")
    alone, tree = found["one by one"], found["tree"]
    samples = packing_ranks.group_samples(Processor.load(tiny_model))
    assert (alone["rows"], tree["rows"]) == ([7], [1])
    assert tree["tokens"] < found["merged"]["tokens"] < alone["tokens"] == sum(sample.length for sample in samples)
    distinct = {image: grid for sample in samples for image, grid in zip(sample.images, sample.grids, strict=True)}
    assert tree["patches"] == sum(int(grid.prod()) for grid in distinct.values())
    for way in ("tree", "tree, two replicas"):
        assert torch.equal(alone["marks"], found[way]["marks"])
        assert (alone["logprobs"] / found[way]["logprobs"] - 1).abs().max() < limit
        whole = torch.stack([gradient.norm() for gradient in alone["gradients"].values()]).norm()
        for name, gradient in alone["gradients"].items():
            difference = (gradient - found[way]["gradients"][name]).norm()
            assert difference < 1e-6 * whole, name
            assert difference < each_limit * gradient.norm(), name


def patches(sample: TrainingSample) -> int:
    """Patches of all images of a step."""
    return int(sample.grids.prod(axis=1).sum())
