"""The learner on two gloo processes, two replicas of a tiny Qwen3-VL with images."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_webrl.config.schema import Config
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.model.platform import Platform
from megatron_webrl.trainer import main
from megatron_webrl.trainer.checkpoint.checkpoint_state import load_learner
from megatron_webrl.trainer.data import batching
from megatron_webrl.trainer.loss.objective import make_objective
from megatron_webrl.trainer.metrics.logprob_mismatch import (
    BOUND,
    LagMismatch,
    LogprobMismatch,
    measure_logprob_mismatch,
)
from megatron_webrl.trainer.metrics.token_metrics import loss_metrics
from megatron_webrl.trainer.optimizer import NonFiniteGradient
from tests.metrics_page import undocumented
from tests.trainer.ranks import (
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


def examine(platform: Platform, folder: Path, model: Path) -> dict[str, Any]:
    """Of two replicas: updates, a resume, single steps, and measurements of tokens; and a step of a tensor-parallel."""
    config = make_config(model, folder, data_parallel=2)
    with process_groups(config):
        found = _two_updates(config, platform, folder / "run") | _single_steps(config, platform)
    config = make_config(model, folder, tensor_parallel=2, epochs=1, minibatches=1)
    with process_groups(config):
        packer = main.make_sequence_packer(config, platform)
        one = packer.build(batching.make_samples(make_groups(config))[:1], "token_mean", 10)
        objective = make_objective(config.trainer.loss, None)
        found["one sample, no replicas"], _ = make_learner(config, platform).train_step(one, None, objective)
    return found


def _two_updates(config: Config, platform: Platform, run: Path) -> dict[str, Any]:
    """Two updates; rates of an update's steps; with another schedule, the next rate with and without a resume."""
    learner = make_learner(config, platform)
    found: dict[str, Any] = {"first": update(learner, config, platform)}
    found["scored"] = scored_operations(config, platform)
    checkpoint = save(learner, config, run)
    found["second"] = update(learner, config, platform)
    found["no changes"] = load_learner(checkpoint, make_learner(config, platform, with_weights=False))
    changed, steps = copy.deepcopy(config), config.trainer.epochs * config.trainer.minibatches
    plain, found["rates"] = make_learner(config, platform).optimizer, []
    for _ in range(steps):
        found["rates"].append(plain.learning_rate)
        plain.scheduler.step(1)
    changed.trainer.optimizer.learning_rate *= 2
    changed.trainer.optimizer.schedule, changed.trainer.updates = "linear", 3 * config.trainer.updates
    resumed, fresh = make_learner(changed, platform), make_learner(changed, platform)
    found["changes"] = load_learner(checkpoint, resumed)
    fresh.optimizer.scheduler.step(steps)
    found["next rates"] = [each.learning_rate for each in (resumed.optimizer, fresh.optimizer, plain)]
    return found


def _single_steps(config: Config, platform: Platform) -> dict[str, Any]:
    """A replica without samples, a whole batch in one step, and a gradient that is not finite."""
    config.trainer.epochs = config.trainer.minibatches = 1
    learner, packer = make_learner(config, platform), main.make_sequence_packer(config, platform)
    objective, samples = make_objective(config.trainer.loss, None), batching.make_samples(make_groups(config))
    one = packer.build(samples[:1], "token_mean", 10)
    found: dict[str, Any] = {"one sample": learner.train_step(one, None, objective)[0]}
    found["all"] = update(learner, config, platform)
    found["small gradient"], _ = learner.train_step(packer.build(samples[:1], "constant", 1000), None, objective)
    rows = packer.build(samples, "token_mean", 10)
    found["mismatch"] = _mismatch([*rows, *one])
    before = weights_of(learner)
    for advantage, norm in ((1e30, "inf"), (float("nan"), "nan")):
        for row in rows:
            row.advantage[0] = advantage
        with pytest.raises(NonFiniteGradient, match=f"the gradient norm is {norm}"):
            learner.train_step(rows, None, objective)
    found["unchanged"] = largest_difference(before, weights_of(learner)) == 0
    return found


def _mismatch(rows: list[Any]) -> dict[str, Any]:
    """Tokens of lags 0 to 6, and some of no version, whose log-probabilities differ by up to 0.16, and padding."""
    differences = []
    for batch in rows:
        numbers = torch.arange(len(batch.versions))
        batch.versions[:] = torch.where(numbers % 5 == 0, batching.NO_VERSION, 7 - numbers % 7)
        differences.append(0.08 * (numbers % 5 - 2).float())
    logprobs = [batch.behaviour_logprobs + each for batch, each in zip(rows, differences, strict=True)]
    return {
        "found": measure_logprob_mismatch(rows, logprobs, 7),
        "versions": torch.cat([batch.versions for batch in rows]).numpy(),
        "differences": torch.cat(differences).numpy(),
        "counted": torch.cat([batch.weight > 0 for batch in rows]).numpy(),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> list[dict[str, Any]]:
    return results(examine, tmp_path_factory.mktemp("learner"), tiny_model)


def test_a_replica_without_samples_changes_no_step(found: list[dict[str, Any]]) -> None:
    for rank in found:
        expected = rank["one sample, no replicas"]
        assert rank["one sample"] == {key: pytest.approx(each, rel=1e-3, abs=1e-6) for key, each in expected.items()}
        assert rank["first"] == found[0]["first"]


def test_an_update_counts_its_tokens_operations_and_clipped_gradients(found: list[dict[str, Any]]) -> None:
    replicas = found[0]
    (metrics, _), (single, gap) = replicas["first"], replicas["all"]
    assert metrics["gradient_norm"] > 0
    assert 0 < metrics["clipped"] < metrics["response_tokens"] < metrics["tokens"]
    # Two epochs over the same tokens as one, and a pass for the log-probabilities of the minibatch that is second.
    assert metrics["tokens"] == 2 * single["tokens"]
    scored = sum(rank["scored"] for rank in found)
    assert 0 < scored < single["operations"] / 3
    assert metrics["operations"] == pytest.approx(2 * single["operations"] + scored, rel=1e-5)
    assert metrics["loss"] != replicas["second"][0]["loss"]
    assert single["clipped"] == single["clipped_logprob/count"] == 0  # a single step
    assert single["approx_kl"] == pytest.approx(0, abs=1e-6)
    assert gap.tokens == single["response_tokens"]
    large, small = replicas["one sample"], replicas["small gradient"]
    assert (large["gradient_norm"] > 1.0, large["gradient_clipped"]) == (True, 1.0)
    assert (small["gradient_norm"] < 1.0, small["gradient_clipped"]) == (True, 0.0)
    assert 0 < metrics["gradient_clipped"] < 1  # the mean over four steps
    for part in ("first", "second"):
        figures = loss_metrics(replicas[part][0])
        assert undocumented(figures) == []
        assert np.isfinite([*figures.values()]).all()
        assert figures["advantage_std"] > 0
        assert figures["behaviour_logprob_mean"] == pytest.approx(-6)  # of every token of the groups
    assert replicas["unchanged"]  # by a gradient that is not finite


def test_a_resume_continues_the_configured_schedule_and_names_what_has_changed(found: list[dict[str, Any]]) -> None:
    resumed, fresh, other = found[0]["next rates"]
    assert resumed == fresh != other
    assert found[0]["no changes"] == []
    assert [change.split(", now ")[1] for change in found[0]["changes"]] == ["0.006", "0.0006", "linear", "1", "49"]
    rates = found[0]["rates"]
    assert len(set(rates)) == len(rates)
    assert found[0]["first"][0]["learning_rate"] == pytest.approx(np.mean(rates))


def test_the_mismatch_of_each_version_lag_is_that_of_all_ranks_without_padding(found: list[dict[str, Any]]) -> None:
    first, second = (rank["mismatch"] for rank in found)
    arrays = {name: np.concatenate([first[name], second[name]]) for name in ("versions", "differences", "counted")}
    lags = np.minimum(7 - arrays["versions"], 4)
    assert not arrays["counted"].all()
    assert set(first["found"].by_lag) == {0, 1, 2, 3, 4}
    for lag, measured in first["found"].by_lag.items():
        d = arrays["differences"][arrays["counted"] & (arrays["versions"] >= 0) & (lags == lag)].astype(float)
        assert measured.tokens == len(d)
        wanted = [np.abs(d).mean(), (np.exp(d) - 1 - d).mean(), np.abs(d).max(), (np.abs(d) > BOUND).mean()]
        assert [measured.mean, measured.kl, measured.largest, measured.beyond] == pytest.approx(wanted, abs=1e-5)


def test_a_mean_mismatch_under_the_same_weights_and_a_divergence_at_any_lag_are_alarms() -> None:
    far, near = LagMismatch(10, 0.2, 0.02, 1.5, 0.5), LagMismatch(10, 0.01, 0.4, 0.1, 0.0)
    diverged = LagMismatch(10, 0.01, 0.6, 1.5, 0.5)
    for by_lag, words in (
        ({0: far, 1: near}, "of 10 tokens under the same weights differ by 0.2 nats in the mean and 1.5 at most"),
        ({0: near, 1: far}, ""),
        ({1: near, 2: diverged}, "by 0.6 nats over 10 tokens of version lag 2, which differ by 1.5 at most"),
    ):
        alarms = LogprobMismatch(by_lag).alarms()
        assert len(alarms) == bool(words)
        assert words in "".join(alarms)


def choose(platform: Platform, _: Path) -> list[bool]:
    """Whether kernels are compiled: on the CPU, and on CUDA where it works on all ranks and on one."""
    with process_groups(ParallelSizes()):
        cuda, rank = Platform("cuda", torch.device("cpu"), "gloo"), torch.distributed.get_rank()
        found = [main.choose_compilation(platform, torch.float32)]
        for problem in ("", "no C compiler" if rank else ""):
            with mock.patch.object(main, "compilation_problem", return_value=problem):
                found.append(main.choose_compilation(cuda, torch.float32))
    return found


def test_all_ranks_take_compiled_kernels_or_none(tmp_path: Path) -> None:
    for found in results(choose, tmp_path):
        assert found == [False, True, False]
