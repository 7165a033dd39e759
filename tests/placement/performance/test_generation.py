"""Predicted engines against published measurements, and the balance of engines and browsers."""

from __future__ import annotations

import pytest

from megatron_webrl.model import parameter_counts
from megatron_webrl.placement.cost_model import EngineCosts
from megatron_webrl.placement.hardware import CARDS, Rates
from megatron_webrl.placement.model_shape import ModelShape
from megatron_webrl.placement.prediction import EpisodeLengths, GenerationPrediction, predict_generation
from tests.placement.performance.test_training import made

H100 = Rates.of_card(CARDS["H100"])
EIGHT = ModelShape.from_description(parameter_counts.config_sections("8B"))


def engine(*overrides: str, model: ModelShape = EIGHT) -> EngineCosts:
    return EngineCosts(made(*overrides), model, H100)


def predicted(size: str, *overrides: str, lengths: EpisodeLengths | None = None) -> GenerationPrediction:
    sections = parameter_counts.config_sections(size)
    return predict_generation(made(*overrides), sections, H100, lengths or EpisodeLengths())


# silybench-data, Qwen3-8B in bfloat16 on one H100, vLLM 0.30: docs/scaling.md.
@pytest.mark.parametrize(
    ("requests", "context", "milliseconds"), [(1, 512, 6.87), (64, 1088, 9.6), (128, 1088, 12.3), (256, 1088, 18.6)]
)
def test_a_token_takes_about_as_long_as_published(requests: int, context: int, milliseconds: float) -> None:
    assert 1000 * engine().decode(requests, context) == pytest.approx(milliseconds, rel=0.25)


def test_a_prompt_takes_about_as_long_as_published() -> None:
    assert 1000 * engine().prefill(2048, 0) == pytest.approx(61, rel=0.25)


def test_a_single_request_reads_all_weights_and_a_mixture_reads_few_experts() -> None:
    seconds = engine().decode(1, 0)
    text = EIGHT.counts.total - EIGHT.counts.embedding_parameters - EIGHT.counts.vision
    assert seconds == pytest.approx(2 * text / (0.8 * 3.35e12) + 0.5e-3, rel=1e-6)
    mixture = ModelShape.from_description(parameter_counts.config_sections("30B-A3B"))
    alone, many = (engine(model=mixture).decode(requests, 0) for requests in (1, 128))
    assert alone < seconds / 1.5  # 3B of 30B
    assert many > 3 * alone  # nearly all experts


def test_requests_in_the_engine_balance_those_in_browsers() -> None:
    found, lengths = predicted("8B"), EpisodeLengths()
    episodes = 4 * 8
    assert 1 < found.requests < episodes
    # Little's law: episodes in browsers are the steps per second times the seconds of each.
    assert episodes - found.requests == pytest.approx(lengths.browser_seconds / found.step_seconds, rel=1e-6)


def test_slow_browsers_leave_the_engine_idle() -> None:
    slow = predicted("8B", lengths=EpisodeLengths(browser_seconds=10000.0))
    assert slow.requests < 1
    one = slow.step_seconds  # of one request alone
    assert slow.response_tokens_per_second == pytest.approx(4 * 32 * 240 / (10000 + one), rel=0.01)


def test_engines_compute_no_more_requests_than_their_limit() -> None:
    quick = EpisodeLengths(browser_seconds=0.01)
    assert predicted("8B", lengths=quick).requests > 30
    assert predicted("8B", "rollout.max_num_seqs=8", lengths=quick).requests == 8


def test_more_engines_and_a_fuller_cache_are_faster() -> None:
    one, two = predicted("8B"), predicted("8B", "cluster.nodes=2")
    assert two.update_seconds == pytest.approx(one.update_seconds / 2)
    append = predicted("8B", "rollout.context.policy=append")
    assert append.hit_rate > 0.5 > one.hit_rate > 0
    assert append.parts["prefill"] / append.prompt_tokens < one.parts["prefill"] / one.prompt_tokens
    assert append.parts["images"] == one.parts["images"]  # the one new screenshot


def test_an_fp8_cache_and_tensor_parallel_ranks_shorten_a_token() -> None:
    plain = engine().decode(64, 4000)
    assert engine("rollout.engine_options.kv_cache_dtype=fp8").decode(64, 4000) < plain
    assert plain / 2 < engine("rollout.tensor_parallel=2").decode(64, 4000) < plain
