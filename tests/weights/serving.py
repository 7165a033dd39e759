"""Control service, real trainer ranks and real engines under load, for the tests of updates."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from megatron_webrl.config.load import save_config
from megatron_webrl.config.schema import Config
from megatron_webrl.control.client import ControlClient
from megatron_webrl.model.convert.hf_files import copy_metadata
from megatron_webrl.placement.placement import RankInfo
from megatron_webrl.rollout.engine.vllm_engine import VLLMEngine
from megatron_webrl.rollout.engine.weight_client import WeightClient
from megatron_webrl.rollout.generator import Generation
from tests import forks, job_control
from tests.rollout.engine.engines import expected, picture, prompt
from tests.weights import trainer_rank

SECONDS = 20.0  # timeout of one transfer
TOLERANCE = {"float32": (1e-4, 1e-4), "bfloat16": (0.02, 0.003)}
"""By the engine's type: of log-probabilities, the largest and the mean difference; of thousands of tokens in bfloat16
0.010 and 0.0017 were seen, and with the weights of another version 0.5 and 0.09."""


def configuration(folder: Path, model: Path, engines: int = 1, **trainer: int) -> Config:
    config = Config()
    config.run.name, config.run.directory = "weights", str(folder / "runs")
    config.run.startup_timeout_seconds, config.run.heartbeat_timeout_seconds = 200.0, 10.0
    config.model.path, config.model.platform = str(model), "cpu"
    config.rollout.engines, config.rollout.max_model_len, config.rollout.max_new_tokens = engines, 2048, 150
    config.rollout.kv_cache_mib, config.rollout.operation_timeout_seconds = 64, 60.0
    config.weights.timeout_seconds, config.weights.bucket_mib, config.weights.verify = SECONDS, 4, True
    config.trainer = replace(config.trainer, **trainer)
    return config


def changed_folders(folder: Path, model: Path, count: int, scale: float = 0.02) -> list[Path]:
    """Copies of a model folder with increasingly different weights: each adds noise of `scale`."""
    made = []
    reference = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    tied = bool(reference.config.tie_word_embeddings)
    for number in range(1, count + 1):
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter += scale * torch.randn(parameter.shape, generator=generator)
        target = folder / f"changed-{number}"
        copy_metadata(model, target)
        state = {n: t.contiguous() for n, t in reference.state_dict().items() if not (tied and n == "lm_head.weight")}
        save_file(state, target / "model.safetensors", metadata={"format": "pt"})
        made.append(target)
    return made


@dataclass
class Stage:
    """A control service in this process, and the trainer's processes."""

    folder: Path
    config: Config
    trainers: list[BaseProcess] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.address_file, _ = job_control.start(self.folder, self.config.run.heartbeat_timeout_seconds)
        self.control = self.connect("test")
        self.path = self.folder / "config.yaml"
        save_config(self.config, self.path)

    def connect(self, role: str) -> ControlClient:
        return job_control.connect(self.address_file, role)

    def start_trainer(self, folders: Sequence[Path]) -> None:
        size = self.config.trainer_world_size
        for rank in range(size):
            arguments = (RankInfo(rank, size, rank), self.path, self.address_file, list(folders), self.folder)
            process = forks.context().Process(target=trainer_rank.run, args=arguments)
            process.start()
            self.trainers.append(process)

    def kill_trainer(self) -> None:
        for process in self.trainers:
            process.kill()
            process.join()
        self.trainers.clear()

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.folder.glob("trainer-*.log")))

    async def until(self, condition: Callable[[], Any], what: str, seconds: float = 120.0) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            ended = [process.exitcode for process in self.trainers if process.exitcode]
            assert not ended, f"a trainer ended before {what}:\n{self.logs()}"
            assert time.monotonic() < deadline, f"no {what} within {seconds} s:\n{self.logs()}"
            await asyncio.sleep(0.02)
        return found

    def close(self) -> None:
        self.kill_trainer()
        self.control.end_job("finished")
        self.control.shutdown()


@dataclass
class Served:
    """An engine that receives offered weights and answers prompts continuously."""

    worker: int
    engine: VLLMEngine
    weight_client: WeightClient
    answers: list[tuple[int, Generation]] = field(default_factory=list)  # with the index of the picture
    errors: list[Exception] = field(default_factory=list)

    async def pump(self) -> None:
        while True:
            await self.weight_client.poll()
            await asyncio.sleep(0.02)

    async def load(self, number: int) -> None:
        """Send one prompt after the other once the engine has weights."""
        while self.engine.version < 0:
            await asyncio.sleep(0.02)
        while True:
            number += 1
            try:
                answer = await self.engine.generate(None, prompt(self.engine, 1, str(number)), [picture(number % 7)])
            except Exception as error:
                self.errors.append(error)
                return
            self.answers.append((number % 7, answer))


@asynccontextmanager
async def served(stage: Stage, worker: int, requests: int, **rollout: Any) -> AsyncIterator[Served]:
    """Start an engine of the trainer with a load of `requests` concurrent requests."""
    config = replace(stage.config, rollout=replace(stage.config.rollout, **rollout))
    control = stage.connect(f"rollout-{worker}")
    control.start_heartbeat()
    instance_id = control.register_instance()
    engine = await VLLMEngine.start(config, worker, instance_id)
    found = Served(worker, engine, WeightClient(config, control, engine, f"rollout-{worker}.{instance_id}"))
    tasks = [asyncio.create_task(found.pump())]
    tasks += [asyncio.create_task(found.load(1000 * n)) for n in range(requests)]
    try:
        yield found
        assert not tasks[0].done(), tasks[0].exception()
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError, Exception):
                await task
        control.close()
        await engine.close()


def load(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def check_answers(found: Served, folders: Sequence[Path], base: Path) -> int:
    """Compare every token's log-probability with its version's weights; returns the number of checked answers."""
    models = [load(folder) for folder in (base, *folders)]
    differences, checked = [], 0
    for number, answer in found.answers:
        if found.engine.processor.image_token_id in answer.response_token_ids:
            continue  # transformers would treat it as an image
        for version in set(answer.versions.tolist()):
            scores = expected(models[version], found.engine, answer, [picture(number)])
            differences.append((answer.logprobs - scores)[answer.versions == version])
        checked += 1
    absolute = np.abs(np.concatenate(differences))
    largest, mean = TOLERANCE[found.engine._config.engine_dtype]
    assert absolute.max() < largest, f"{absolute.max():.4f}, {(absolute >= largest).sum()} of {absolute.size} tokens"
    assert absolute.mean() < mean, f"{absolute.mean():.4f}"
    return checked
