"""Variants of training through the whole learner, on one process: a reference policy, RAFT and a step critic."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_webrl.config.advantage import advantage_config
from megatron_webrl.config.loss import loss_config
from megatron_webrl.config.schema import Config
from megatron_webrl.model.convert.conversion import ConversionOptions, megatron_to_hf
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.model.platform import Platform
from megatron_webrl.trainer.checkpoint.checkpoint_files import CheckpointError
from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner
from megatron_webrl.trainer.data import batching
from megatron_webrl.trainer.learner import ReferencePolicy
from megatron_webrl.trainer.main import make_sequence_packer
from megatron_webrl.trainer.metrics.token_metrics import loss_metrics
from megatron_webrl.trainer.reference import make_reference
from megatron_webrl.types import Trajectory
from tests.metrics_page import undocumented
from tests.model.convert import hf_folders
from tests.trainer.ranks import (
    VERSION,
    largest_difference,
    make_config,
    make_groups,
    make_learner,
    process_groups,
    results,
    save,
    scored_operations,
    update,
    weights_of,
)

Found = Callable[[str], Any]
STEPS = 2  # of an update of the critic: two minibatches


def run(platform: Platform, folder: Path, model: Path, part: str) -> Any:
    with process_groups(ParallelSizes()):
        if part == "reference":
            return _reference(make_config(model, folder, epochs=1, minibatches=1), platform)
        if part == "critic":
            return _critic(model, platform, folder)
        return _variants(model, platform)


def _reference(config: Config, platform: Platform) -> dict[str, Any]:
    """A run with a warm start of one update; two updates with the penalty; a checkpoint; a resumed run."""
    config.run_folder.mkdir(parents=True)
    config.trainer.optimizer.schedule, config.trainer.optimizer.warmup_fraction = "constant", 0.0
    learner, groups = make_learner(config, platform), make_groups(config, 2)
    update(learner, config, platform, groups)
    config.trainer.warm_start.demonstrations, config.trainer.loss.kl_coefficient = 1, 0.1
    rows = make_sequence_packer(config, platform).build(batching.make_samples(groups), "constant", 10)
    found: dict[str, Any] = {"start": learner.compute_logprobs(rows)}
    learner = replace(learner, reference=make_reference(learner.chunks, config))
    found["figures"] = [update(learner, config, platform, groups)[0] for _ in range(2)]
    before, scores = weights_of(learner), learner.compute_logprobs(rows)
    (found["reference"],) = learner.compute_reference_logprobs([rows])
    found["moved"] = max(float((a - b).abs().max()) for a, b in zip(scores, found["start"], strict=True))
    found["weights unchanged"] = largest_difference(before, weights_of(learner)) == 0
    checkpoint = save(learner, config, config.run_folder)
    config.run.resume = True
    resumed = make_learner(config, platform)
    resumed = replace(resumed, reference=make_reference(resumed.chunks, config))
    load_learner(checkpoint, resumed)
    found["resumed"], found["at checkpoint"] = resumed.compute_logprobs(rows), learner.compute_logprobs(rows)
    (found["resumed reference"],) = resumed.compute_reference_logprobs([rows])
    return found


def _variants(model: Path, platform: Platform) -> dict[str, Any]:
    """An update of each loss on one group, whose two successes are apart from a baseline only."""
    found: dict[str, Any] = {}
    config = make_config(model, epochs=1)
    learner = make_learner(config, platform)
    for name in ("grpo", "raft", "raft_plus_plus"):
        config.trainer.loss = loss_config(name)
        (group,) = make_groups(config, 1)
        if name != "grpo":
            group = replace(group, trajectories=tuple(map(_success, group.trajectories)))
        steps = learner.optimizer.step_count
        metrics, _ = update(learner, config, platform, [group])
        found[name] = (learner.optimizer.step_count - steps, metrics)
    found["scored"] = scored_operations(config, platform, [group])
    return found


def _success(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, reward=1.0, outcome="success")


def _critic(model: Path, platform: Platform, folder: Path) -> dict[str, Any]:
    """Warm-ups, and in half precision resumes with and without a critic from checkpoints of both kinds."""
    config = make_config(model, epochs=1)
    config.trainer.advantage = advantage_config("critic", discount=0.5)
    found = {"warm-up": [_warm_up(copy.deepcopy(config), platform, trunk) for trunk in (True, False)]}
    config.model.dtype = "bfloat16"
    plain, groups = copy.deepcopy(config), make_groups(config, 2)
    plain.trainer.advantage = advantage_config()
    learner, without = make_learner(config, platform), make_learner(plain, platform)
    for name, each, saved_by, resumed_by in (("no critic", without, plain, config), ("critic", learner, config, plain)):
        update(each, saved_by, platform, groups)
        checkpoint, trained = save(each, saved_by, folder / name), weights_of(each)
        resumed_by.model.checkpoint = str(checkpoint)
        other = make_learner(resumed_by, platform)
        resumed_by.model.checkpoint = ""
        started = weights_of(other)
        head = started.pop("value_head", None)
        equal = all(torch.equal(tensor, trained[key]) for key, tensor in started.items())
        with pytest.raises(CheckpointError) as refused:
            load_learner(checkpoint, other)
        found[name] = {"error": str(refused.value), "head": head, "equal": equal}
    resumed = make_learner(config, platform)
    load_learner(checkpoint, resumed)
    found["half"] = {
        "dtypes": {str(p.dtype): name for name, p in learner.models[-1].named_parameters()},
        "updates": [update(each, config, platform, groups)[0] for each in (learner, resumed)],
        "heads": [each.models[-1].value_head.weight.detach().clone() for each in (learner, resumed)],
    }  # fmt: skip
    megatron_to_hf(checkpoint.parent, folder / "hf", 2**30, ConversionOptions())
    del trained["value_head"]
    return found | {"converted": hf_folders.same(hf_folders.read(folder / "hf"), trained)}


def _warm_up(config: Config, platform: Platform, train_trunk: bool) -> list[tuple[float, float, int]]:
    """Of an update of the warm-up and of a later one: the largest change of a weight of the head and of the policy, and
    the policy's Adam steps.
    """
    config.trainer.advantage = advantage_config("critic", discount=0.5, train_trunk=train_trunk)
    learner, changes = make_learner(config, platform), []
    for warmup_updates in (VERSION + 1, VERSION):
        config.trainer.advantage.warmup_updates = warmup_updates
        before = weights_of(learner)
        update(learner, config, platform, make_groups(config, 2))
        change = {name: float((each - before[name]).abs().max()) for name, each in weights_of(learner).items()}
        changes.append((change.pop("value_head"), max(change.values()), learner.optimizer.step_count))
    return changes


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Found:
    folder = tmp_path_factory.mktemp("variants")
    return cache(lambda part: results(run, folder / part, tiny_model, part, ranks=1)[0])


def assert_equal(ones: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, ones, others))


def test_the_reference_is_the_policy_after_the_warm_start_also_after_a_resume(found: Found) -> None:
    reference = found("reference")
    assert_equal(reference["start"], reference["reference"])
    assert reference["moved"] > 0.01
    assert reference["weights unchanged"]
    assert_equal(reference["start"], reference["resumed reference"])
    assert_equal(reference["at checkpoint"], reference["resumed"])
    first, *later = [metrics["reference_kl"] for metrics in reference["figures"]]
    assert first == 0
    assert all(value > 1e-4 for value in later)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_has_the_reference_weights_in_the_context_and_its_own_also_after_an_error(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).to(dtype)
    parameters = list(module.parameters())
    start, places = [each.detach().clone() for each in parameters], [each.data_ptr() for each in parameters]
    reference = ReferencePolicy([module])
    for _ in range(2):
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(torch.randn_like(parameter))
        trained = [each.detach().clone() for each in parameters]
        with suppress(ZeroDivisionError), reference.swapped_in():
            assert_equal(parameters, start)
            raise ZeroDivisionError
        assert_equal(parameters, trained)
        assert not any(map(torch.equal, trained, start))
    assert [each.data_ptr() for each in parameters] == places


def test_only_a_loss_with_ratios_scores_first_and_only_a_baseline_keeps_groups_whole(found: Found) -> None:
    scored = (variants := found("variants")).pop("scored")
    assert {name: steps for name, (steps, _) in variants.items()} == {"grpo": 1, "raft": 2, "raft_plus_plus": 2}
    operations = {name: metrics["operations"] for name, (_, metrics) in variants.items()}
    tokens = {name: metrics["tokens"] for name, (_, metrics) in variants.items()}
    assert operations["raft"] / tokens["raft"] == pytest.approx(operations["grpo"] / tokens["grpo"], rel=1e-5)
    assert tokens["raft_plus_plus"] == tokens["raft"]
    assert scored > 0
    assert operations["raft_plus_plus"] == pytest.approx(operations["raft"] + scored, rel=1e-5)
    for totals in [*found("reference")["figures"], *(metrics for _, metrics in variants.values())]:
        assert undocumented(loss_metrics(totals)) == []


def test_a_warm_up_changes_the_head_alone(found: Found) -> None:
    for (head, policy, steps), later in found("critic")["warm-up"]:
        assert head > 1e-4
        assert (policy, steps) == (0, STEPS)
        assert min(later[:2]) > 1e-4
        assert later[2] == STEPS  # counted from the end of the warm-up on


def test_the_head_is_in_single_precision_and_resumes_bit_for_bit(found: Found) -> None:
    half = found("critic")["half"]
    assert half["dtypes"].keys() == {"torch.bfloat16", "torch.float32"}
    assert half["dtypes"]["torch.float32"] == "value_head.weight"
    assert half["updates"][0] == half["updates"][1]
    assert torch.equal(*half["heads"])


def test_a_checkpoint_of_the_other_kind_is_refused_but_its_weights_start_a_run(found: Found) -> None:
    without, with_critic = found("critic")["no critic"], found("critic")["critic"]
    assert "tensor value_head.weight [1, 128] is missing from " in without["error"]
    assert "tensor value_head.weight of " in with_critic["error"]
    assert without["equal"]
    assert with_critic["equal"]
    assert not without["head"].any()
    assert with_critic["head"] is None
    assert found("critic")["converted"]  # bit for bit, without the head and the optimiser's state
