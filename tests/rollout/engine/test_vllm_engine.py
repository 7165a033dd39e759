"""The real engine: what it reports, what an update changes, and how it fails.

One engine serves the module; the last test ends it. A second one is started in a process of its own, to be
killed with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
import torch.distributed as dist
import transformers
from PIL import Image

from megatron_webrl.config.rollout import ContextConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.model.parameter_map import parameter_mappings, parameter_shapes, to_megatron
from megatron_webrl.rollout.contexts.policies import make_context
from megatron_webrl.rollout.engine.errors import EngineDeadError
from megatron_webrl.rollout.engine.vllm_engine import VLLMEngine, WeightUpdateError
from megatron_webrl.rollout.generator import Generation, GenerationError
from megatron_webrl.types import Action, Observation
from megatron_webrl.weights import transport
from megatron_webrl.weights.engine_map import EngineSizes
from megatron_webrl.weights.plan import EngineTopology, TrainerTopology, TransferPlan

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOLERANCE = 1e-4
BLOCK = 128  # tokens that vLLM's CPU build caches together
STAGING = 2**20


def picture(seed: int, width: int = 160, height: int = 210) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, format="PNG")
    return buffer.getvalue()


def configuration(model: Path) -> Config:
    config = Config()
    config.model.path, config.model.platform = str(model), "cpu"
    config.rollout.max_model_len, config.rollout.max_new_tokens = 2048, 24
    config.rollout.kv_cache_mib, config.rollout.operation_timeout_seconds = 64, 60.0
    config.run.startup_timeout_seconds, config.weights.timeout_seconds = 200.0, 30.0
    return config


def engine_memory() -> set[str]:
    """Shared memory of the kinds that vLLM and torch make; other programs use /dev/shm meanwhile."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "vllm", "torch_", "nccl"))}


@pytest.fixture(scope="module")
def shared_memory() -> set[str]:
    return engine_memory()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_model: Path, shared_memory: set[str]) -> AsyncIterator[VLLMEngine]:
    engine = await VLLMEngine.start(configuration(tiny_model), 0)
    yield engine
    await engine.close()


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> torch.nn.Module:
    """The same model in transformers; updates of the engine are applied to it as well."""
    return transformers.AutoModelForImageTextToText.from_pretrained(tiny_model, dtype=torch.float32).eval()


class Sender:
    """A trainer of one rank for one engine of one: a store, a plan, and a link driven by threads of the test."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self.model, self.transfers = model, 0
        engines = EngineTopology.uniform(EngineSizes(), (("here",),))
        self.plan = TransferPlan(model.config, TrainerTopology(ParallelSizes(), 1, ("here",)), engines, 4, STAGING)
        self.entries = parameter_mappings(model.config, expert_format="transposed")
        shapes = parameter_shapes(self.entries, 1)
        self.parameters = {name: torch.zeros(shape) for name, shape in shapes.items()}
        self.link: transport.TransferLink

    async def meet(
        self, engine: VLLMEngine, name: str
    ) -> tuple[transport.TransferLink | BaseException, BaseException | None]:
        """What the trainer's and the engine's side of forming a link return or raise, each awaited to its end."""
        joining = asyncio.to_thread(transport.join_link, self.store, name, 0, 2, 30.0, "gloo")
        description = self.plan.to_json() | {"dtype": "float32"}
        joined = engine.join_weight_link("127.0.0.1", self.store.port, name, description)
        return await asyncio.gather(joining, joined, return_exceptions=True)

    async def join(self, engine: VLLMEngine, name: str = "weights/test") -> None:
        link, refusal = await self.meet(engine, name)
        assert refusal is None
        assert isinstance(link, transport.TransferLink)
        self.link = link

    async def send(self, engine: VLLMEngine, version: int) -> float:
        state = self.model.state_dict()
        for entry in self.entries:
            to_megatron(entry, state[entry.hf_param], self.parameters[entry.megatron_param], 0, 1)
        self.transfers += 1
        outgoing = transport.OutgoingMessages(self.link, self.plan.messages(0), {0: 1})
        sending = asyncio.to_thread(
            transport.send,
            [outgoing], self.parameters.__getitem__, torch.float32, STAGING, self.transfers, 30.0,
        )  # fmt: skip
        outcome, seconds = await asyncio.gather(sending, engine.update_weights(version, self.transfers))
        assert outcome == {self.link.name: None}
        return seconds


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sender(engine: VLLMEngine, reference: torch.nn.Module) -> Sender:
    sender = Sender(reference)
    await sender.join(engine)
    return sender


def perturb(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)


def prompt(engine: VLLMEngine, images: int, text: str = "Click the button.") -> np.ndarray:
    content = [{"type": "text", "text": text}, *({"type": "image"} for _ in range(images))]
    return engine.processor.encode_chat([{"role": "user", "content": content}])


@torch.no_grad()
def expected(model: torch.nn.Module, engine: VLLMEngine, answer: Generation, images: list[bytes]) -> np.ndarray:
    """Log-probabilities of the response's tokens by transformers: float32 [response]."""
    pixels, grids = engine.processor.pixels(images)
    tokens = torch.from_numpy(np.concatenate([answer.prompt_token_ids, answer.response_token_ids])).long()[None]
    kinds = (tokens == engine.processor.image_token_id).int()
    vision = {"pixel_values": pixels, "image_grid_thw": torch.from_numpy(grids).long()} if images else {}
    logits = model(input_ids=tokens, mm_token_type_ids=kinds, **vision).logits[0].float()
    start = len(answer.prompt_token_ids)
    rows = logits[start - 1 : -1].log_softmax(-1)
    return rows.gather(1, tokens[0, start:, None])[:, 0].numpy()


async def respond(engine: VLLMEngine, tokens: np.ndarray, images: list[bytes]) -> Generation:
    """One response that transformers can score: it takes every image placeholder for an image."""
    for _ in range(10):
        answer = await engine.generate(None, tokens, images)
        if scorable(engine, answer):
            return answer
    raise AssertionError("ten responses with image placeholders in a row")


def scorable(engine: VLLMEngine, answer: object) -> bool:
    return isinstance(answer, Generation) and engine.processor.image_token_id not in answer.response_token_ids


async def wait_until(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        await asyncio.sleep(0.01)


async def test_the_engine_reports_the_log_probabilities_of_transformers(
    engine: VLLMEngine, reference: torch.nn.Module
) -> None:
    images = [picture(0), picture(1, 320, 120)]
    answer = await respond(engine, prompt(engine, 2), images)
    np.testing.assert_allclose(answer.logprobs, expected(reference, engine, answer, images), atol=TOLERANCE)
    assert answer.logprobs.dtype == np.float32
    assert (answer.versions == 0).all()


async def test_the_prompt_is_expanded_as_the_processor_does(engine: VLLMEngine) -> None:
    images = [picture(0), picture(1, 320, 120)]
    answer = await respond(engine, prompt(engine, 2), images)
    np.testing.assert_array_equal(answer.image_grids, engine.processor.grids(images))
    np.testing.assert_array_equal(
        answer.prompt_token_ids, engine.processor.expand_image_tokens(prompt(engine, 2), answer.image_grids)
    )
    assert answer.text == engine.processor.decode(answer.response_token_ids)


async def test_the_engine_tells_what_its_prefix_cache_had(engine: VLLMEngine) -> None:
    tokens = prompt(engine, 1, "Click what has not been clicked before. " * 20)
    first, again = [await respond(engine, tokens, [picture(7)]) for _ in range(2)]
    assert first.cached_prompt_tokens < len(first.prompt_token_ids) // 2  # at most what all prompts begin with
    assert len(again.prompt_token_ids) - 128 <= again.cached_prompt_tokens < len(again.prompt_token_ids)


async def test_an_appended_prompt_comes_from_the_prefix_cache_images_and_answers_included(
    engine: VLLMEngine, reference: torch.nn.Module
) -> None:
    settings = ContextConfig(policy="append", rounds=4, compact=True)
    context = make_context(engine.processor, settings, 2000)
    pages = [Observation(picture(20 + n, 640, 320), "http://a", "A page", True) for n in range(4)]
    context.start_episode("Click it.", pages[0])
    before = 0  # tokens of the prompt and the answer before
    for page in pages[1:]:
        prompt = context.build_prompt()
        images = [context.screenshots[i] for i in prompt.image_indices]
        for _ in range(10):
            answer = await engine.generate(None, prompt.token_ids, images)
            if not engine.processor.has_special_tokens(answer.response_token_ids):
                break
        else:
            raise AssertionError("ten answers with special tokens in a row")
        # Whole blocks of what was computed for the answer before; its last token was not.
        assert (before - 1) // BLOCK * BLOCK <= answer.cached_prompt_tokens < len(answer.prompt_token_ids)
        np.testing.assert_allclose(answer.logprobs, expected(reference, engine, answer, images), atol=TOLERANCE)
        before = len(answer.prompt_token_ids) + len(answer.response_token_ids)
        context.add_step(answer, Action("wait"), None, page)
    assert len(prompt.image_indices) == 3


async def test_the_image_counts(engine: VLLMEngine, reference: torch.nn.Module) -> None:
    blank = io.BytesIO()
    Image.new("RGB", (160, 210), "white").save(blank, format="PNG")
    answer = await respond(engine, prompt(engine, 1), [picture(2)])
    seen = np.abs(answer.logprobs - expected(reference, engine, answer, [picture(2)])).max()
    unseen = np.abs(answer.logprobs - expected(reference, engine, answer, [blank.getvalue()])).max()
    assert seen < TOLERANCE < 10 * TOLERANCE < unseen


async def test_many_prompts_at_once_are_answered_each_with_its_own_image(
    engine: VLLMEngine, reference: torch.nn.Module
) -> None:
    answers = await asyncio.gather(*(respond(engine, prompt(engine, 1), [picture(i)]) for i in range(16)))
    for index, answer in enumerate(answers):
        np.testing.assert_allclose(
            answer.logprobs, expected(reference, engine, answer, [picture(index)]), atol=TOLERANCE
        )


async def test_a_response_ends_at_the_end_token_or_at_the_limit(engine: VLLMEngine) -> None:
    answers = await asyncio.gather(*(respond(engine, prompt(engine, 0, str(i)), []) for i in range(8)))
    for answer in answers:
        assert 1 <= len(answer.response_token_ids) <= 24
        ended = answer.response_token_ids[-1] in (
            engine.processor.eos_token_id,
            engine.processor.tokenizer.pad_token_id,
        )
        assert answer.finish_reason == ("stop" if ended else "length")


async def test_a_bad_prompt_is_an_error_and_the_engine_serves_on(engine: VLLMEngine) -> None:
    with pytest.raises(GenerationError, match="2 image placeholders and 1 images"):
        await respond(engine, prompt(engine, 2), [picture(0)])
    with pytest.raises(GenerationError, match="are no PNG, JPEG or WebP"):
        await respond(engine, prompt(engine, 1), [b"no image"])
    with pytest.raises(GenerationError, match=r"rollout\.max_model_len=2048"):
        await respond(engine, prompt(engine, 0, "Click " * 2100), [])
    assert len((await respond(engine, prompt(engine, 0), [])).response_token_ids)


async def test_an_image_placeholder_in_a_response_is_a_token_like_any_other(engine: VLLMEngine) -> None:
    engine._sampling.allowed_token_ids = [engine.processor.image_token_id]
    try:
        answer = await engine.generate(None, prompt(engine, 1), [picture(0)])
    finally:
        engine._sampling.allowed_token_ids = None
    assert set(answer.response_token_ids) == {engine.processor.image_token_id}
    assert engine.processor.has_special_tokens(answer.response_token_ids)
    assert not engine.processor.has_special_tokens(engine.processor.encode_response("wait"))


@contextlib.contextmanager
def long_responses(engine: VLLMEngine, tokens: int) -> Iterator[None]:
    short, engine._sampling.max_tokens = engine._sampling.max_tokens, tokens
    try:
        yield
    finally:
        engine._sampling.max_tokens = short


def tokens_under_way(engine: VLLMEngine) -> int:
    states = engine._llm.output_processor.request_states.values()
    return min((state.detokenizer.num_output_tokens() for state in states), default=0)


async def test_a_response_that_takes_too_long_is_an_error_and_is_given_up(engine: VLLMEngine) -> None:
    limit, engine._config.rollout.operation_timeout_seconds = engine._config.rollout.operation_timeout_seconds, 0.3
    try:
        with long_responses(engine, 1900):
            calls = (engine.generate(None, prompt(engine, 0, str(i)), []) for i in range(8))
            results = await asyncio.gather(*calls, return_exceptions=True)
    finally:
        engine._config.rollout.operation_timeout_seconds = limit
    late = [
        r for r in results if isinstance(r, GenerationError) and "0.3 s (rollout.operation_timeout_seconds)" in str(r)
    ]
    assert late
    await wait_until(lambda: engine._llm.get_num_unfinished_requests() == 0, 10, "the end of given-up requests")


async def test_after_an_update_the_engine_answers_with_the_sent_weights(
    engine: VLLMEngine, sender: Sender, reference: torch.nn.Module
) -> None:
    images = [picture(0), picture(1, 320, 120)]  # seen before the update: no cache may give their old embeddings
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


async def test_requests_in_flight_go_on_over_an_update_and_each_token_has_its_version(
    engine: VLLMEngine, sender: Sender, reference: torch.nn.Module
) -> None:
    old = transformers.AutoModelForImageTextToText.from_config(reference.config, dtype=torch.float32).eval()
    old.load_state_dict(reference.state_dict())
    with long_responses(engine, 150):
        calls = (engine.generate(None, prompt(engine, 1, str(i)), [picture(i)]) for i in range(8))
        requests = [asyncio.create_task(call) for call in calls]
        await wait_until(lambda: tokens_under_way(engine) >= 20, 30, "20 tokens of each response")
        perturb(reference, seed=2)
        await sender.send(engine, 2)
        answers = await asyncio.gather(*requests, return_exceptions=True)
    answered = [(index, answer) for index, answer in enumerate(answers) if scorable(engine, answer)]
    over = [(index, answer) for index, answer in answered if set(answer.versions) == {1, 2}]
    assert len(over) >= 2
    for index, answer in over:
        first = int((answer.versions == 1).sum())
        assert (answer.versions == np.repeat([1, 2], [first, len(answer.versions) - first])).all()
        by_old, by_new = (expected(model, engine, answer, [picture(index)]) for model in (old, reference))
        np.testing.assert_allclose(answer.logprobs[:first], by_old[:first], atol=TOLERANCE)
        np.testing.assert_allclose(answer.logprobs[first:], by_new[first:], atol=TOLERANCE)


async def test_requests_whose_images_came_from_the_prefix_cache_go_on_over_an_update(
    engine: VLLMEngine, sender: Sender, reference: torch.nn.Module
) -> None:
    content = [{"type": "image"}, {"type": "text", "text": "Click the button. " * 100}]
    tokens = engine.processor.encode_chat([{"role": "user", "content": content}])
    await respond(engine, tokens, [picture(3)])  # leaves the image's tokens in the prefix cache
    with long_responses(engine, 150):
        requests = [asyncio.create_task(engine.generate(None, tokens, [picture(3)])) for _ in range(4)]
        await wait_until(lambda: tokens_under_way(engine) >= 20, 30, "20 tokens of each response")
        perturb(reference, seed=3)
        await sender.send(engine, 3)
        answers = await asyncio.gather(*requests, return_exceptions=True)
    over = [answer for answer in answers if scorable(engine, answer) and set(answer.versions) == {2, 3}]
    assert over
    for answer in over:
        last = answer.versions == 3
        by_new = expected(reference, engine, answer, [picture(3)])
        np.testing.assert_allclose(answer.logprobs[last], by_new[last], atol=TOLERANCE)


async def test_with_salted_caches_later_prompts_see_the_new_weights_and_running_ones_go_on(
    engine: VLLMEngine, sender: Sender, reference: torch.nn.Module
) -> None:
    engine._config.weights.cache_invalidation = "salt"
    try:
        with long_responses(engine, 150):
            calls = (engine.generate(None, prompt(engine, 1, str(i)), [picture(4)]) for i in range(4))
            requests = [asyncio.create_task(call) for call in calls]
            await wait_until(lambda: tokens_under_way(engine) >= 20, 30, "20 tokens of each response")
            perturb(reference, seed=4)
            await sender.send(engine, 4)
            # The same prompt and picture: neither their keys and values nor their embeddings may be the old ones.
            after = await respond(engine, prompt(engine, 1, "0"), [picture(4)])
            answers = await asyncio.gather(*requests, return_exceptions=True)
    finally:
        engine._config.weights.cache_invalidation = "reset"
    np.testing.assert_allclose(after.logprobs, expected(reference, engine, after, [picture(4)]), atol=TOLERANCE)
    over = [answer for answer in answers if scorable(engine, answer) and set(answer.versions) == {3, 4}]
    assert over  # with contexts that the old weights computed


async def test_a_plan_for_another_model_is_refused_by_name_and_the_engine_serves_on(
    engine: VLLMEngine, reference: torch.nn.Module
) -> None:
    config = transformers.AutoConfig.for_model(**reference.config.to_dict())
    config.text_config.num_hidden_layers += 1
    other = Sender(transformers.AutoModelForImageTextToText.from_config(config))
    here, there = await asyncio.wait_for(other.meet(engine, "weights/other"), 40)
    for refusal, kind in ((here, transport.TransferError), (there, WeightUpdateError)):
        assert isinstance(refusal, kind)
        assert re.search(r"different plans: .*layers\.\d+\.input_layernorm\.weight", str(refusal))
    assert len((await respond(engine, prompt(engine, 0), [])).response_token_ids)


async def test_experts_are_updated_too_a_failed_update_silences_the_engine_and_its_worker_takes_it_along(
    tmp_path: Path,
) -> None:
    from tools.make_tiny_model import make_tiny_model

    model = make_tiny_model(tmp_path / "experts", experts=4, seed=3)
    log, result = tmp_path / "log", tmp_path / "report.json"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.rollout.engine.engine_process", str(model), str(result)],
            stdout=output,
            stderr=output,
        )
    cores: list[psutil.Process] = []
    try:
        await wait_until(lambda: result.exists() or process.poll() is not None, 200, "the report")
        assert result.exists(), log.read_text()[-3000:]
        report = json.loads(result.read_text())
        assert report["experts"] < TOLERANCE
        assert report["update"].startswith("WeightsError: engine 0 did not take version 2: rank 0: TransferError")
        assert report["torn"]
        assert report["in_flight"] == report["response"] == "TimeoutError"  # kept, and not answered
        assert report["healed"] < TOLERANCE
        cores = [psutil.Process(pid) for pid in report["cores"]]
        assert cores
        assert all(core.is_running() for core in cores)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    await wait_until(lambda: not any(_lives(core) for core in cores), 10, "the end of the engine core")


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.alone  # what other engines have in shared memory looks the same
async def test_a_dead_engine_core_is_an_error_that_names_the_engine_and_nothing_is_left(
    engine: VLLMEngine, shared_memory: set[str]
) -> None:
    with long_responses(engine, 1900):
        request = asyncio.create_task(engine.generate(None, prompt(engine, 0), []))
        await wait_until(lambda: tokens_under_way(engine) >= 1, 20, "a first token")
        mine = psutil.Process().children(recursive=True)
        cores = [child for child in mine if "EngineCore" in child.name() or "spawn_main" in " ".join(child.cmdline())]
        assert cores
        for core in cores:
            core.kill()
        with pytest.raises(EngineDeadError, match="engine 0 is dead"):
            await asyncio.wait_for(request, 20)
    with pytest.raises(EngineDeadError, match="engine 0 is dead"):
        await respond(engine, prompt(engine, 0), [])
    await engine.close()
    await wait_until(lambda: not any(_lives(core) for core in cores), 10, "the end of the engine core")
    assert engine_memory() <= shared_memory
