"""Control service, real trainer ranks and models, for the tests of updates."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from megatron_webrl.config.load import parse_config, save_config
from megatron_webrl.config.schema import Config
from megatron_webrl.control.child_process import die_with_parent
from megatron_webrl.control.client import ControlClient
from megatron_webrl.model.convert.hf_files import copy_metadata
from megatron_webrl.placement.placement import RankInfo
from tests import forks, job_control


def configuration(folder: Path, model: Path, engines: int = 1, **trainer: int) -> Config:
    config = Config()
    config.run.name, config.run.directory = "weights", str(folder / "runs")
    config.run.startup_timeout_seconds, config.run.heartbeat_timeout_seconds = 200.0, 10.0
    config.model.path, config.model.platform = str(model), "cpu"
    config.rollout.engines, config.rollout.max_model_len, config.rollout.max_new_tokens = engines, 2048, 150
    config.rollout.kv_cache_mib, config.rollout.operation_timeout_seconds = 64, 60.0
    config.weights.timeout_seconds, config.weights.bucket_mib, config.weights.verify = 20.0, 4, True
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


def send_weights(rank: RankInfo, config_file: Path, address: Path, folders: Sequence[Path], logs: Path) -> None:
    """One rank of a real trainer that only sends weights; its output goes to `logs`/trainer-RANK.log.

    Version 0 is the configuration's model, version n the n-th folder's weights, sent when `go/<n>` is among the facts;
    the first rank sets `sent/<n>` to the result.
    """
    die_with_parent()
    with (logs / f"trainer-{rank.rank}.log").open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # Imported already in the server that forks this process, and not to be imported beside vLLM.
    from megatron_webrl.model.build import load_hf
    from megatron_webrl.trainer import parallel
    from megatron_webrl.trainer.main import load_model, make_learner
    from megatron_webrl.trainer.weight_sync import WeightSyncer

    config = parse_config(config_file)
    control = ControlClient(address, f"trainer-{rank.rank}")
    control.start_heartbeat()
    platform = parallel.initialize(config, rank, control, f"test/{control.register_instance()}")
    learner = make_learner(config, load_model(config, platform))
    weight_syncer = WeightSyncer(learner.models, config, control, platform)
    for version in range(len(folders) + 1):
        if version:
            control.wait_for_key(f"go/{version}", 120, f"the request for version {version}")
            load_hf(learner.models, folders[version - 1])
        weight_syncer.sync(version)
        if rank.rank == 0:
            control.put_json(f"sent/{version}", {"lost": weight_syncer.failed_transfers})
    parallel.shutdown()


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
            process = forks.context().Process(target=send_weights, args=arguments)
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


def load(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
