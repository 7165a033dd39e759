"""Routed experts of a real engine equal those of transformers: of every token, by the weights that computed it last.

Its KV cache holds fewer tokens than all requests have, and a step fewer than a prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from megatron_webrl.rollout.engine import vllm_environment
from megatron_webrl.rollout.engine.vllm_engine import VLLMEngine
from megatron_webrl.rollout.generator import Generation
from tests.rollout.engine.engines import (
    Sender,
    configuration,
    logprobs,
    long_responses,
    perturb,
    picture,
    prompt,
    respond,
    scorable,
    tokens_in_flight,
)
from tests.waiting import eventually
from tests.weights.serving import load
from tools.make_tiny_model import make_tiny_model

pytestmark = [pytest.mark.only_v2, pytest.mark.asyncio(loop_scope="module")]
BLOCK, BLOCKS, REQUESTS = 32, 25, 6
INSTRUCTION = "Click the button that the picture shows, then say what you see. " * 8
Served = tuple[VLLMEngine, Sender]
Asked = tuple[np.ndarray, list[bytes]]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["blocking", "overlapped"])
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """An engine and its trainer. vLLM's CPU platform switches asynchronous scheduling off; only its runner needs to."""
    folder = tmp_path_factory.mktemp("experts")
    config = configuration(make_tiny_model(folder / "model", experts=16, experts_per_token=4, seed=3))
    config.rollout.groups_in_flight, config.rollout.group_size, config.rollout.max_model_len = 1, REQUESTS, 768
    config.rollout.engine_options = {
        "max_num_batched_tokens": 192, "block_size": BLOCK, "num_gpu_blocks_override": BLOCKS,
    }  # fmt: skip
    engine_config = vllm_environment.engine_config

    def scheduled(*arguments: Any) -> Any:
        found = engine_config(*arguments)
        found.scheduler_config.async_scheduling = request.param == "overlapped"
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_environment, "engine_config", scheduled)
        engine = await VLLMEngine.start(config, 0)
    assert await engine.features() == {"cuda_graphs": False, "async_scheduling": request.param == "overlapped"}
    sender = Sender(load(folder / "model"), folder)
    await sender.join(engine)
    await sender.send(engine, 0)
    yield engine, sender
    await engine.close()


def compare(served: Served, answer: Generation, images: list[bytes]) -> None:
    """All recorded experts equal the choices of the routers in transformers with the trainer's weights."""
    engine, sender = served
    chosen: list[Any] = []
    layers = sender.model.model.language_model.layers
    hooks = [each.mlp.gate.register_forward_hook(lambda *call: chosen.append(call[2][2])) for each in layers]
    logprobs(sender.model, engine.processor, answer, images)
    for hook in hooks:
        hook.remove()
    found = np.stack([each.numpy() for each in chosen], axis=1)[:-1]  # the engine does not compute the last token
    np.testing.assert_array_equal(np.sort(answer.experts), np.sort(found))


def short_prompts(engine: VLLMEngine) -> list[Asked]:
    return [(prompt(engine, 1, f"{i} Click the button."), [picture(i)]) for i in range(REQUESTS)]


async def test_tokens_of_the_prefix_cache_have_the_experts_of_the_request_that_computed_them(served: Served) -> None:
    engine, _ = served
    for cached in (0, 6 * BLOCK):
        answer = await respond(engine, prompt(engine, 1, INSTRUCTION), [picture(0)])
        assert answer.cached_prompt_tokens >= cached
        compare(served, answer, [picture(0)])


async def test_requests_that_the_kv_cache_cannot_hold_together_have_all_experts(served: Served) -> None:
    engine, _ = served
    asked = short_prompts(engine)
    with long_responses(engine, 110):
        answers = await asyncio.gather(*(engine.generate(None, *each) for each in asked))
    blocks = [-(-(len(each.prompt_token_ids) + len(each.response_token_ids)) // BLOCK) for each in answers]
    assert sum(blocks) > BLOCKS > sum(-(-len(each.prompt_token_ids) // BLOCK) for each in answers)
    compared = [each for each in zip(answers, asked, strict=True) if scorable(engine, each[0])]
    assert len(compared) > 2
    for answer, (_, images) in compared:
        compare(served, answer, images)


async def test_an_aborted_request_leaves_its_experts_to_those_that_find_its_tokens_in_the_cache(served: Served) -> None:
    engine, _ = served
    for computed in range(3):
        asked = prompt(engine, 1, f"{computed} {INSTRUCTION}"), [picture(20)]
        request = asyncio.create_task(engine.generate(None, *asked))
        await eventually(lambda least=computed: tokens_in_flight(engine) >= least)
        request.cancel()
        answer = await respond(engine, *asked)
        assert answer.cached_prompt_tokens > 0 or not computed
        compare(served, answer, asked[1])


async def test_after_an_update_all_tokens_of_a_request_have_the_experts_of_the_new_weights(served: Served) -> None:
    engine, sender = served
    asked = short_prompts(engine)
    await respond(engine, *asked[0])  # the cache has its tokens before the update
    with long_responses(engine, 40):
        requests = [asyncio.create_task(engine.generate(None, *each)) for each in asked]
        await eventually(lambda: tokens_in_flight(engine) >= 10)
        perturb(sender.model, seed=1)
        await sender.send(engine, 1)
        answers = await asyncio.gather(*requests)
    over = [
        (answer, images) for answer, (_, images) in zip(answers, asked, strict=True)
        if scorable(engine, answer) and set(answer.versions) == {0, 1}
    ]  # fmt: skip
    assert len(over) > 2
    for answer, images in over:
        compare(served, answer, images)
