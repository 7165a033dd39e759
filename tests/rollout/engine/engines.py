"""Helpers of tests with a real engine: prompts, reference log-probabilities, and a trainer that sends weights."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from megatron_webrl.config.schema import Config
from megatron_webrl.control.connection import Connection
from megatron_webrl.model.architectures import parameter_mappings
from megatron_webrl.model.layout import ParallelSizes
from megatron_webrl.model.parameter_map import parameter_shapes, to_megatron
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.engine.vllm_engine import Sampling, VLLMEngine
from megatron_webrl.rollout.generator import Generation
from megatron_webrl.types import Step
from megatron_webrl.weights import transport
from megatron_webrl.weights.engine_map import EngineSizes
from megatron_webrl.weights.plan import EngineTopology, TrainerTopology, TransferPlan
from tests import job_control

TOLERANCE = 1e-4
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
    config.rollout.kv_cache_mib, config.rollout.operation_timeout_seconds = 64, 180.0  # interpreted kernels are slow
    config.run.startup_timeout_seconds, config.weights.timeout_seconds = 200.0, 30.0
    return config


class Sender:
    """A trainer of one rank for an engine of one rank: control service, plan, and a link in threads of the test."""

    def __init__(self, model: torch.nn.Module, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        """`folder`: of the control service. `dtype`: of the weights that are sent."""
        self.control, _ = job_control.start(folder)
        self.model, self.transfers, self.dtype = model, 0, dtype
        engines = EngineTopology.uniform(EngineSizes(), (("here",),))
        trainer, size = TrainerTopology(ParallelSizes(), 1, ("here",)), dtype.itemsize
        self.plan = TransferPlan(model.config, trainer, engines, size, STAGING)
        self.entries = parameter_mappings(model.config, expert_format="transposed")
        shapes = parameter_shapes(self.entries, 1)
        self.parameters = {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}
        self.link: transport.TransferLink

    async def try_join(
        self, engine: VLLMEngine, name: str
    ) -> tuple[transport.TransferLink | BaseException, BaseException | None]:
        """Join a link from both sides; what each side returns or raises."""
        facts = Connection(self.control, "trainer-0", 30.0)
        joining = asyncio.to_thread(transport.join_link, facts, name, 0, 2, 30.0, "host")
        description = self.plan.to_json() | {"dtype": str(self.dtype).removeprefix("torch."), "backend": "host"}
        description["engine"] = 0
        joined = engine.join_weight_link(self.control, name, description)
        return await asyncio.gather(joining, joined, return_exceptions=True)

    async def join(self, engine: VLLMEngine, name: str = "weights/test") -> None:
        link, refusal = await self.try_join(engine, name)
        assert refusal is None
        assert isinstance(link, transport.TransferLink)
        self.link = link

    async def send(self, engine: VLLMEngine, version: int) -> float:
        state = self.model.state_dict()
        for entry in self.entries:
            to_megatron(entry, state[entry.hf_param], self.parameters[entry.megatron_param], 0, 1)
        self.transfers += 1
        outgoing = self.link, self.plan.messages(0)
        sending = asyncio.to_thread(
            transport.send,
            [outgoing], self.parameters.__getitem__, self.dtype, STAGING, self.transfers, 30.0,
        )  # fmt: skip
        outcome, seconds = await asyncio.gather(sending, engine.update_weights(version, self.transfers))
        assert outcome == {self.link.name: None}
        return seconds


def perturb(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)


def prompt(engine: VLLMEngine, images: int, text: str = "Click the button.") -> np.ndarray:
    content = [{"type": "text", "text": text}, *({"type": "image"} for _ in range(images))]
    return engine.processor.encode_chat([{"role": "user", "content": content}])


@torch.no_grad()
def logprobs(
    model: torch.nn.Module, processor: Processor, answer: Generation | Step, images: list[bytes]
) -> torch.Tensor:
    """Log-probabilities at each token of the response and after it, by transformers: [response + 1, vocabulary]."""
    pixels, grids = processor.pixels(images)
    tokens = torch.from_numpy(np.concatenate([answer.prompt_token_ids, answer.response_token_ids])).long()[None]
    kinds = (tokens == processor.image_token_id).int()
    vision = {"pixel_values": pixels, "image_grid_thw": torch.from_numpy(grids).long()} if images else {}
    logits = model(input_ids=tokens, mm_token_type_ids=kinds, **vision).logits[0].float()
    return logits[len(answer.prompt_token_ids) - 1 :].log_softmax(-1)


def expected(model: torch.nn.Module, engine: VLLMEngine, answer: Generation, images: list[bytes]) -> np.ndarray:
    """Log-probabilities of the response's tokens by transformers: float32 [response]."""
    return of_response(logprobs(model, engine.processor, answer, images), answer)


def of_response(logprobs: torch.Tensor, answer: Generation | Step) -> np.ndarray:
    """Those of the tokens that the response has."""
    tokens = torch.from_numpy(answer.response_token_ids).long()
    return logprobs[:-1].gather(1, tokens[:, None])[:, 0].numpy()


async def respond(
    engine: VLLMEngine, tokens: np.ndarray, images: list[bytes], sampling: Sampling | None = None
) -> Generation:
    """One response without image placeholders, which transformers would take for images."""
    for _ in range(10):
        answer = await engine.generate(None, tokens, images, sampling)
        if scorable(engine, answer):
            return answer
    raise AssertionError("ten responses in a row have image placeholders")


def scorable(engine: VLLMEngine, answer: object) -> bool:
    return isinstance(answer, Generation) and engine.processor.image_token_id not in answer.response_token_ids


@contextlib.contextmanager
def long_responses(engine: VLLMEngine, tokens: int) -> Iterator[None]:
    short, engine._sampling.max_tokens = engine._sampling.max_tokens, tokens
    try:
        yield
    finally:
        engine._sampling.max_tokens = short


def tokens_in_flight(engine: VLLMEngine) -> int:
    states = engine._llm.output_processor.request_states.values()
    return min((state.detokenizer.num_output_tokens() for state in states), default=0)
