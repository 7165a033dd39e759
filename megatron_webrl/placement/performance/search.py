"""The fastest layout of the trainer among those that fit: tensor, pipeline and expert sizes, recomputation, packing."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.model.hf_config import has_experts
from megatron_webrl.placement.hardware import Card
from megatron_webrl.placement.memory_estimate import check_memory, check_parallel_layout, estimate_memory
from megatron_webrl.placement.performance.prediction import Prediction, predict
from megatron_webrl.placement.prediction import EpisodeLengths

SIZES = (1, 2, 4, 8, 16, 32)
RECOMPUTE = ("none", "selective", "full")
SEQUENCE_SHARES = (1.0, 1.5, 2.0, 3.0)  # tokens of a micro-batch, over rollout.max_model_len


@dataclass(frozen=True)
class Layout:
    """A layout that fits, with its prediction."""

    config: Config
    prediction: Prediction

    @property
    def seconds(self) -> float:
        """What training and weight sync of an update take; layouts are compared by it."""
        training = self.prediction.training
        assert training is not None
        return training.train_seconds + training.sync_seconds

    @property
    def settings(self) -> dict[str, Any]:
        """The searched settings of trainer.*."""
        trainer = self.config.trainer
        names = ("tensor_parallel", "pipeline_parallel", "expert_parallel", "recompute", "tokens_per_microbatch")
        return {name: getattr(trainer, name) for name in names}


@dataclass(frozen=True)
class SearchResult:
    """All layouts that fit, the fastest first."""

    layouts: tuple[Layout, ...]
    tried: int  # layouts, those that do not fit included


def search_layouts(config: Config, description: Mapping[str, Any], card: Card, lengths: EpisodeLengths) -> SearchResult:
    """Search the layouts of the trainer on the GPUs that `config` gives it; engines and batch stay.

    A layout fits if the model can be split so, tensor-parallel groups lie inside nodes, and `webrl placement --memory`
    accepts it. Raises ConfigError without a trainer.
    """
    if not config.trainer_world_size:
        raise ConfigError("a search needs a trainer, but evaluation.only=true; set it to false")
    layouts, tried = [], 0
    for candidate in _candidates(config, description):
        tried += 1
        try:
            check_parallel_layout(candidate, dict(description))
            check_memory(candidate, estimate_memory(candidate, description))
            layouts.append(Layout(candidate, predict(candidate, description, card, lengths)))
        except ConfigError:
            continue
    return SearchResult(tuple(sorted(layouts, key=lambda layout: layout.seconds)), tried)


def _candidates(config: Config, description: Mapping[str, Any]) -> Iterator[Config]:
    world, node = config.trainer_world_size, config.trainer_gpus_per_node
    for tensor, pipeline, expert, recompute, share in itertools.product(
        SIZES, SIZES, SIZES if has_experts(description) else (1,), RECOMPUTE, SEQUENCE_SHARES
    ):
        replica = tensor * pipeline * config.trainer.context_parallel
        if world % replica or node % tensor or (world // pipeline) % expert:
            continue
        candidate = copy.deepcopy(config)
        trainer = candidate.trainer
        trainer.tensor_parallel, trainer.pipeline_parallel, trainer.expert_parallel = tensor, pipeline, expert
        trainer.data_parallel, trainer.recompute = world // replica, recompute
        trainer.tokens_per_microbatch = int(share * config.rollout.max_model_len)
        if pipeline == 1:
            trainer.virtual_pipeline = 1
        yield candidate
