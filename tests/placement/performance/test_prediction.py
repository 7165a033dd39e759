"""Cards, predicted jobs, the search over settings, and the commands that print them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_webrl.cli import main
from megatron_webrl.config.load import parse_config
from megatron_webrl.model import parameter_counts
from megatron_webrl.placement.hardware import CARDS, Rates, find_card
from megatron_webrl.placement.memory_estimate import check_memory, estimate_memory
from megatron_webrl.placement.prediction import EngineStep, EpisodeLengths
from megatron_webrl.placement.search import Candidates, search
from megatron_webrl.placement.throughput import RandomWorkload, binding_limit, predict

CONFIGS = Path(__file__).parents[3] / "configs"
EIGHT = str(CONFIGS / "8b_1node.yaml")
SLOWER = [
    "trainer.tensor_parallel=4", "trainer.recompute=full", "trainer.tokens_per_microbatch=16384",
    "rollout.max_model_len=16384", "rollout.max_new_tokens=4096", "trainer.optimizer.keep=device",
]  # fmt: skip
DESCRIPTION = parameter_counts.config_sections("8B")


def placed(file: Path, *words: str) -> dict[str, Any]:
    """What `webrl placement` writes."""
    assert main(["placement", *words, "--json", str(file)]) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_a_devices_name_leads_to_its_card() -> None:
    for device, name in {
        "NVIDIA H100 80GB HBM3": "H100", "NVIDIA A100-SXM4-80GB": "A100", "NVIDIA GH200 480GB": "GH200",
        "NVIDIA B200": "B200", "NVIDIA H100 PCIe": None,  # slower than the SXM form
        "NVIDIA H100 NVL": None, "NVIDIA GB200": None, "NVIDIA L40S": None,
    }.items():  # fmt: skip
        found = find_card(device)
        assert (found.name if found else None) == name


def test_card_and_lengths_of_a_prediction_are_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "placed.json"
    h200 = placed(file, EIGHT, "--time", "--card", "H200")["time"]
    assert "training, H200" in capsys.readouterr().out
    assert h200["card"] == "H200"
    words = ("steps_of_success=3", "steps_of_failure=6", "response_tokens=180")
    short = placed(file, EIGHT, "--time", "--card", "H200", "--lengths", *words)["time"]
    assert short["training"]["tokens"] < h200["training"]["tokens"]
    assert short["job"]["per_hour"] > 1.5 * h200["job"]["per_hour"]


def test_what_cannot_be_predicted_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--card", "H100"], "--card is for --time; add --time"),
        (["--search"], "--search is for --time; add --time"),
        (["--time", "model.dtype=float32"], "model.dtype=float32 has no prediction"),
        (["--time", "model.path=somewhere"], "--time: model.path=somewhere is no folder"),
        (["--time", "--lengths", "response_tokens=20000"], "exceeds trainer.tokens_per_microbatch=8192"),
        (["--time", "--lengths", "pages=3"], "--lengths pages=3"),
        (["--time", "--lengths", "steps_of_success=few"], "'few' is no number"),
        (["--time", "--lengths", "steps_of_failure=0.5"], "--lengths steps_of_failure=0.5: the least is 1"),
        (["--time", "--lengths", "success=1"], "the least is 0.001, the most 0.999"),
        (["--time", "--search", "layout", "evaluation.only=true"], "a search needs a trainer"),
        (["--time", "rollout.group_size=1"], "the job would train nothing: 10000 groups in a row were dropped"),
    ):
        settings = [word for word in words if "." in word.partition("=")[0]]
        assert main(["placement", EIGHT, *settings, *[word for word in words if word not in settings]]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert message in line
    assert main(["placement", str(CONFIGS / "quickstart.yaml"), "--time"]) == 2
    assert "cluster.gpus_per_node=0" in capsys.readouterr().err


def test_the_work_is_as_the_lengths_say() -> None:
    given, config = EpisodeLengths(), parse_config(EIGHT, [])
    step = EngineStep.of_config(config, DESCRIPTION, Rates.of_card(CARDS["H100"]), given)
    work = RandomWorkload(given, 8, step, frozenset({"all_failed", "all_succeeded"}), imitates=False)
    drawn = [work.draw(seed, np.random.default_rng(seed)) for seed in range(500)]
    episodes = [episode for group in drawn for episode in group.episodes]
    steps = [each for episode in episodes for each in episode.steps]
    assert np.mean([each.response for each in steps]) == pytest.approx(given.response_tokens, rel=0.03)
    assert np.mean([each.browser for each in steps]) == pytest.approx(given.browser_seconds, rel=0.06)
    assert np.mean([each.generation for each in steps]) == pytest.approx(step.seconds(1), rel=0.03)
    lengths = np.array([len(episode.steps) for episode in episodes])
    # Failures of 12.5 steps; a geometric length of 5.1 cut off at 10 has a mean of 4.5.
    assert lengths.mean() == pytest.approx(0.546 * 12.5 + 0.454 * 4.5, rel=0.06)
    assert {group.drop_reason for group in drawn} == {None, "all_succeeded", "all_failed"}
    raft = replace(work, dropped=frozenset({"all_failed"}), imitates=True)
    drawn = [raft.draw(seed, np.random.default_rng(seed)) for seed in range(500)]
    assert {group.drop_reason for group in drawn} == {None, "all_failed"}
    assert np.mean([episode.trainable for group in drawn for episode in group.episodes]) == pytest.approx(
        0.454, rel=0.1
    )


def test_the_published_run_is_near_its_prediction() -> None:
    # AsyncWebRL, arXiv 2606.05597: about 3,100 trajectories an hour on 64 H100, which were not fitted.
    config = parse_config(str(CONFIGS / "published" / "asyncwebrl_8b.yaml"), [])
    job = predict(config, DESCRIPTION, CARDS["H100"], EpisodeLengths()).job
    assert job is not None
    assert job.per_hour == pytest.approx(3100, rel=0.25)
    assert 1 < job.staleness < 1.5 < job.staleness_max == 2


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        ((), "trainer: it hardly waits"),
        (("rollout.groups_in_flight=1",), "groups in flight: all of rollout.groups_in_flight=1 are in use"),
        (("rollout.max_staleness=0",), "admission: rollout.max_staleness=0"),
        (("rollout.mode=sync",), "mode: rollout.mode=sync: a batch ends with its slowest episode"),
        (("cluster.numa_cores=[0-27]",), "cores: "),
    ],
)
def test_the_limit_of_a_job_is_named(overrides: tuple[str, ...], limit: str) -> None:
    config = parse_config(EIGHT, list(overrides))
    lengths = EpisodeLengths(browser_cpu_seconds=20.0 if "cores" in limit else 0.079)
    found = predict(config, DESCRIPTION, CARDS["H100"], lengths)
    assert binding_limit(config, found).startswith(limit)
    assert found.job is not None
    shares = found.job.waiting + found.job.training + found.job.syncing
    assert shares == pytest.approx(1, abs=0.03)  # the rest is checkpoints


def test_the_search_changes_what_trains_more_trajectories() -> None:
    config, card = parse_config(EIGHT, SLOWER), CARDS["H100"]
    first, *rest = search(config, DESCRIPTION, card, EpisodeLengths(), ("staleness", "layout"))
    assert (first.changed, first.prediction) == ({}, predict(config, DESCRIPTION, card, EpisodeLengths()))
    words = {name: value for step in rest for name, value in step.changed.items()}
    assert words["trainer.recompute"] == "none"
    assert set(words) <= {
        "trainer.recompute", "trainer.tokens_per_microbatch", "rollout.max_model_len", "trainer.tensor_parallel",
        "rollout.max_new_tokens", "trainer.optimizer.keep",
        "rollout.max_staleness", "rollout.stale", "trainer.loss.max_token_lag",
    }  # fmt: skip
    best = parse_config(EIGHT, [*SLOWER, *(f"{name}={value}" for name, value in words.items())])
    check_memory(best, estimate_memory(best, DESCRIPTION))
    again = predict(best, DESCRIPTION, card, EpisodeLengths())
    assert again == rest[-1].prediction
    assert first.prediction.job is not None
    assert again.job is not None
    assert again.job.per_hour > 1.1 * first.prediction.job.per_hour
    assert config.trainer.recompute == "full"  # the search leaves the configuration alone


def test_a_split_is_tried_with_layouts_of_its_own() -> None:
    config, card = parse_config(EIGHT, SLOWER), CARDS["H100"]  # its tp 4 cannot share out 6 GPUs
    rollout = config.rollout
    candidates = Candidates(DESCRIPTION, card, EpisodeLengths(), rollout.max_model_len, rollout.max_new_tokens)
    found = {words["cluster.engine_gpus_per_node"]: words for words in candidates.split(config)}
    assert found[2]["trainer.tensor_parallel"] == 2
    assert candidates.changed(config, found[2]).trainer.data_parallel == 3


def test_the_command_shows_what_the_search_found_and_engines_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["placement", EIGHT, *SLOWER, "--time", "--search", "layout"]) == 0
    shown = capsys.readouterr().out
    *_, gain, settings = shown.splitlines()
    training = predict(parse_config(EIGHT, SLOWER), DESCRIPTION, CARDS["H100"], EpisodeLengths()).training
    assert training is not None
    mfu = training.operations / sum(training.parts.values()) / training.ranks / 989e12
    assert f"MFU {mfu:.1%}, " in shown
    assert gain.endswith("times as many trajectories; predicted, not measured")
    assert "trainer.recompute=none" in settings.split()
    assert main(["placement", EIGHT, "evaluation.only=true", "--time"]) == 0
    shown = capsys.readouterr().out
    assert ("response tokens/s" in shown, "MFU" in shown, "the job:" in shown) == (True, False, False)
