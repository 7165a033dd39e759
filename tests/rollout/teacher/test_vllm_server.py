"""A real vLLM server as the teacher: its scores are those of its model for exactly the policy's tokens and images."""

from __future__ import annotations

import copy
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tokenizers import AddedToken

from megatron_webrl.config.distillation import DistillationConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model.processor import Processor
from megatron_webrl.rollout.engine import vllm_environment
from megatron_webrl.rollout.teacher import Teacher
from megatron_webrl.types import Step, Trajectory
from tests.rollout.engine.engines import TOLERANCE, configuration, logprobs, of_response, perturb, picture
from tests.trajectories import trajectory
from tests.waiting import until

MAX_MODEL_LEN = 1024
pytestmark = [pytest.mark.slow, pytest.mark.engine]  # only a server renders tokens and images as it does in a run


@pytest.fixture(scope="module")
def url(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_model), "--port", str(port),
        "--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(64 * 2**20),
        "--max-model-len", str(MAX_MODEL_LEN + 1), "--enable-scale-out",
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("teacher") / "server.log"
    environment = os.environ | vllm_environment.engine_environment(configuration(tiny_model))
    with log.open("w") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as server:
        try:
            until(lambda: "startup complete" in log.read_text() or server.poll() is not None, "the server", 400)
            assert server.poll() is None, log.read_text()[-2000:]
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()


def config_for(model: Path, url: str) -> Config:
    config = configuration(model)
    config.rollout.max_model_len = MAX_MODEL_LEN
    config.browser.width, config.browser.height = 320, 200
    config.trainer.distillation = DistillationConfig(coefficient=1.0, url=url)
    return config


def sampled(model: torch.nn.Module, processor: Processor, images: list[bytes], tokens: int, seed: int) -> Step:
    """A step with a prompt of all `images` and a response that the model samples."""
    content = [{"type": "text", "text": "Click."}, *({"type": "image"} for _ in images)]
    prompt = processor.encode_chat([{"role": "user", "content": content}])
    grids = processor.grids(images)
    step = Step(
        prompt_token_ids=processor.expand_image_tokens(prompt, grids), response_token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32), versions=np.zeros(tokens, np.int32),
        images=np.arange(len(images), dtype=np.int32), image_grids=grids, finish_reason="length", action=None,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for _ in range(tokens):
        scores = logprobs(model, processor, step, images)[-1]
        scores[list(processor.placeholder_token_ids)] = -torch.inf
        token = int(torch.multinomial(scores.exp(), 1, generator=generator))
        step = replace(
            step,
            response_token_ids=np.append(step.response_token_ids, np.int32(token)),
            logprobs=np.append(step.logprobs, np.float32(scores[token])),
        )
    return step


def episode_of(model: torch.nn.Module, processor: Processor) -> Trajectory:
    images = [picture(0), picture(1, 300, 180)]
    steps = tuple(sampled(model, processor, images[:shown], 24, shown) for shown in (0, 1, 2))
    return replace(trajectory(reward=1.0), steps=steps, images=tuple(images))


async def test_only_a_teacher_other_than_the_student_diverges(tiny_model: Path, url: str, processor: Processor) -> None:
    model = transformers.AutoModelForImageTextToText.from_pretrained(tiny_model).eval()
    student = copy.deepcopy(model)
    perturb(student, 0)
    same, other = episode_of(model, processor), episode_of(student, processor)
    async with Teacher.open(config_for(tiny_model, url), processor) as teacher:
        scored = [await teacher.scored(each) for each in (same, other)]
    for each in scored:
        assert each.outcome == "success"
        for step in each.steps:
            wanted = logprobs(model, processor, step, [each.images[i] for i in step.images])
            exact = of_response(wanted, step)
            np.testing.assert_allclose(step.teacher_logprobs, exact, atol=TOLERANCE)
    equal, different = (np.concatenate([s.logprobs - s.teacher_logprobs for s in each.steps]) for each in scored)
    assert np.abs(equal).max() < TOLERANCE < np.abs(different).max()


async def test_a_teacher_that_does_not_fit_the_policy_is_refused(tiny_model: Path, url: str) -> None:
    words, pictures = Processor.load(tiny_model), Processor.load(tiny_model)
    words.tokenizer.add_tokens([AddedToken("<|another|>", special=True)])
    pictures._image_processor.size.longest_edge = 128 * 128
    for processor, longer, reason in (
        (Processor.load(tiny_model), 1, f"--max-model-len {MAX_MODEL_LEN + 2}"),
        (words, 0, "its vocabulary differs from that of model.path"),
        (pictures, 0, "the image processors differ"),
    ):
        config = config_for(tiny_model, url)
        config.rollout.max_model_len += longer
        with pytest.raises(ConfigError, match=reason) as caught:
            async with Teacher.open(config, processor):
                pass
        assert "\n" not in str(caught.value)
