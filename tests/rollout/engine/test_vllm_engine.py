"""A real engine: responses, weight updates, faults. One engine serves the module; the last test kills it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
import transformers

from megatron_webrl.rollout.engine.vllm_engine import VLLMEngine, WeightUpdateError
from megatron_webrl.rollout.generator import EngineDeadError, GenerationError
from megatron_webrl.weights import transport
from tests.rollout.engine.engines import (
    TOLERANCE,
    Sender,
    configuration,
    expected,
    logprobs,
    long_responses,
    of_response,
    perturb,
    picture,
    prompt,
    respond,
    scorable,
    tokens_in_flight,
)
from tests.waiting import eventually

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model: Path) -> AsyncIterator[VLLMEngine]:
    config = configuration(tiny_model)
    config.evaluation.only = True  # it serves the weights of the model's folder until the first update
    engine = await VLLMEngine.start(config, 0)
    yield engine
    await engine.close()


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> torch.nn.Module:
    """The same model in transformers; the tests apply updates of the engine to it, too."""
    return transformers.AutoModelForImageTextToText.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sender(engine: VLLMEngine, reference: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Sender:
    sender = Sender(reference, tmp_path_factory.mktemp("control"))
    await sender.join(engine)
    return sender


async def test_log_probabilities_are_those_of_transformers(engine: VLLMEngine, reference: torch.nn.Module) -> None:
    images = [picture(0), picture(1, 320, 120)]
    answer = await respond(engine, prompt(engine, 2), images)
    np.testing.assert_allclose(answer.logprobs, expected(reference, engine, answer, images), atol=TOLERANCE)
    assert answer.logprobs.dtype == np.float32
    assert (answer.versions == 0).all()
    np.testing.assert_array_equal(answer.image_grids, engine.processor.grids(images))
    expanded = engine.processor.expand_image_tokens(prompt(engine, 2), answer.image_grids)
    np.testing.assert_array_equal(answer.prompt_token_ids, expanded)
    assert answer.text == engine.processor.decode(answer.response_token_ids)
    ended = answer.response_token_ids[-1] in (engine.processor.eos_token_id, engine.processor.tokenizer.pad_token_id)
    assert (answer.finish_reason, len(answer.response_token_ids) <= 24) == ("stop" if ended else "length", True)
    colder = await respond(engine, prompt(engine, 2), images, (0.6, 1.0, 0))
    scaled = (logprobs(reference, engine.processor, colder, images) / 0.6).log_softmax(-1)
    np.testing.assert_allclose(colder.logprobs, of_response(scaled, colder), atol=TOLERANCE)


async def test_the_likeliest_token_alone_is_greedy(engine: VLLMEngine, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--v2"):
        pytest.skip("Triton's interpreter does not run the kernel of top_k and top_p")
    images = [picture(0), picture(1, 320, 120)]
    greedy, *likeliest = [
        (await respond(engine, prompt(engine, 2), images, sampling)).response_token_ids
        for sampling in ((0.0, 1.0, 0), (1.0, 1.0, 1), (1.0, 1e-6, 0))
    ]
    for tokens in likeliest:
        np.testing.assert_array_equal(tokens, greedy)


async def test_cuda_graphs_are_those_that_the_ranks_captured(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.config import CUDAGraphMode

    monkeypatch.setattr(engine._llm.vllm_config.compilation_config, "cudagraph_mode", CUDAGraphMode.FULL)
    assert await engine.features() == {"cuda_graphs": False, "async_scheduling": False}


async def test_after_a_bad_prompt_the_engine_still_serves(engine: VLLMEngine) -> None:
    for tokens, images, words in (
        (prompt(engine, 2), [picture(0)], "2 image placeholders and 1 images"),
        (prompt(engine, 1), [b"no image"], "are no PNG, JPEG or WebP"),
        (prompt(engine, 0, "Click " * 2100), [], "rollout.max_model_len=2048"),
    ):
        with pytest.raises(GenerationError, match=words):
            await respond(engine, tokens, images)
    assert len((await respond(engine, prompt(engine, 0), [])).response_token_ids)


async def test_a_response_that_takes_too_long_is_aborted(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._config.rollout, "operation_timeout_seconds", 0.3)
    with long_responses(engine, 1900):
        calls = (engine.generate(None, prompt(engine, 0, str(i)), []) for i in range(8))
        results = await asyncio.gather(*calls, return_exceptions=True)
    late = "0.3 s (rollout.operation_timeout_seconds)"
    assert [result for result in results if isinstance(result, GenerationError) and late in str(result)]
    await eventually(lambda: engine._llm.get_num_unfinished_requests() == 0, 10)


async def test_an_update_takes_effect(engine: VLLMEngine, sender: Sender, reference: torch.nn.Module) -> None:
    images = [picture(0), picture(1, 320, 120)]  # used before the update: no cache may return their old embeddings
    before = await respond(engine, prompt(engine, 2), images)
    old = expected(reference, engine, before, images)
    perturb(reference, seed=1)
    assert np.abs(old - expected(reference, engine, before, images)).max() > 100 * TOLERANCE
    seconds = await sender.send(engine, 1)
    after = await respond(engine, prompt(engine, 2), images)
    np.testing.assert_allclose(after.logprobs, expected(reference, engine, after, images), atol=TOLERANCE)
    assert (after.versions == 1).all()
    assert engine.version == 1
    assert 0 < seconds < 20


async def test_requests_continue_over_an_update(engine: VLLMEngine, sender: Sender, reference: torch.nn.Module) -> None:
    old = copy.deepcopy(reference)
    perturb(reference, seed=2)
    content = [{"type": "image"}, {"type": "text", "text": "Click the button. " * 100}]
    cached = engine.processor.encode_chat([{"role": "user", "content": content}])
    await respond(engine, cached, [picture(3)])  # puts the image's tokens into the prefix cache
    asked = [(prompt(engine, 1, str(i)), [picture(i)]) for i in range(6)] + [(cached, [picture(3)])] * 3
    with long_responses(engine, 80):
        requests = [asyncio.create_task(engine.generate(None, *each)) for each in asked]
        await eventually(lambda: tokens_in_flight(engine) >= 10, 60)
        await sender.send(engine, 2)
        answers = await asyncio.gather(*requests, return_exceptions=True)
    over = [
        (answer, images) for answer, (_, images) in zip(answers, asked, strict=True)
        if scorable(engine, answer) and set(answer.versions) == {1, 2}
    ]  # fmt: skip
    assert len(over) >= 3
    for answer, images in over:
        first = int((answer.versions == 1).sum())
        assert (answer.versions == np.repeat([1, 2], [first, len(answer.versions) - first])).all()
        by_old, by_new = (expected(model, engine, answer, images) for model in (old, reference))
        np.testing.assert_allclose(answer.logprobs[:first], by_old[:first], atol=TOLERANCE)
        np.testing.assert_allclose(answer.logprobs[first:], by_new[first:], atol=TOLERANCE)


async def test_a_plan_of_another_model_fails(engine: VLLMEngine, reference: torch.nn.Module, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(**reference.config.to_dict())
    config.text_config.num_hidden_layers += 1
    other = Sender(transformers.AutoModelForImageTextToText.from_config(config), tmp_path)
    here, there = await asyncio.wait_for(other.try_join(engine, "weights/other"), 40)
    for refusal, kind in ((here, transport.TransferError), (there, WeightUpdateError)):
        assert isinstance(refusal, kind)
        assert "have different plans" in str(refusal)
    assert len((await respond(engine, prompt(engine, 0), [])).response_token_ids)


async def test_a_failed_update_pauses_the_engine_until_a_complete_one_over_another_link(
    engine: VLLMEngine, sender: Sender, reference: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._config.weights, "timeout_seconds", 1.0)
    await sender.join(engine, "weights/short")
    with long_responses(engine, 60):
        in_flight = asyncio.create_task(engine.generate(None, prompt(engine, 0), []))
        await eventually(lambda: tokens_in_flight(engine) >= 1)
        with pytest.raises(WeightUpdateError, match="engine 0 did not take version 3: rank 0: TransferError"):
            await engine.update_weights(3, sender.transfers + 1)  # the trainer does not send it
    assert (engine.version, engine.partially_updated) == (2, True)
    monkeypatch.setattr(engine._config.rollout, "operation_timeout_seconds", 1.5)  # without the pause
    with long_responses(engine, 2):  # far less than the limit, also with Triton's interpreter
        waiting = asyncio.create_task(engine.generate(None, prompt(engine, 0), []))
        done, _ = await asyncio.wait({in_flight, waiting}, timeout=1.6)
    assert not done  # kept without a response
    monkeypatch.undo()
    perturb(reference, seed=3)
    await sender.join(engine, "weights/again")
    await sender.send(engine, 3)
    await asyncio.wait_for(asyncio.gather(in_flight, waiting), 60)
    answer = await respond(engine, prompt(engine, 1), [picture(0)])
    np.testing.assert_allclose(answer.logprobs, expected(reference, engine, answer, [picture(0)]), atol=TOLERANCE)
    assert not engine.partially_updated


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


async def test_a_dead_engine_core_is_an_error_that_names_the_engine(engine: VLLMEngine) -> None:
    with long_responses(engine, 1900):
        request = asyncio.create_task(engine.generate(None, prompt(engine, 0), []))
        await eventually(lambda: tokens_in_flight(engine) >= 1, 20)
        mine = psutil.Process().children(recursive=True)
        cores = [child for child in mine if "EngineCore" in child.name() or "spawn_main" in " ".join(child.cmdline())]
        assert cores
        for core in cores:
            core.kill()
        with pytest.raises(EngineDeadError, match="engine 0 is dead"):  # its limit is weights.timeout_seconds and 90 s
            await asyncio.wait_for(engine.update_weights(1, 1), 20)
        with pytest.raises(EngineDeadError, match="engine 0 is dead"):
            await asyncio.wait_for(request, 20)
    with pytest.raises(EngineDeadError, match="engine 0 is dead"):
        await respond(engine, prompt(engine, 0), [])
    await engine.close()
    await eventually(lambda: not any(map(is_running, cores)), 10)
