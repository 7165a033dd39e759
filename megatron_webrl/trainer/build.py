"""The learner and the row builder that a configuration describes."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

from megatron.core import parallel_state
from megatron.core.utils import get_pg_rank

from megatron_webrl.config import Config
from megatron_webrl.model import qwen3_vl, settings
from megatron_webrl.model.description import describe
from megatron_webrl.model.load import load_hf
from megatron_webrl.model.platform import Platform
from megatron_webrl.model.processing import Processor
from megatron_webrl.model.settings import Settings
from megatron_webrl.trainer.arena import Arena
from megatron_webrl.trainer.checkpoint_state import load_weights
from megatron_webrl.trainer.cost import Cost
from megatron_webrl.trainer.distributed import wrap
from megatron_webrl.trainer.learner import Learner
from megatron_webrl.trainer.optimizer import check_implementation, optimization
from megatron_webrl.trainer.patch_pool import PatchPool
from megatron_webrl.trainer.preparation import Preparation
from megatron_webrl.trainer.rows import RowBuilder

log = logging.getLogger(__name__)


def make_learner(config: Config, platform: Platform) -> Learner:
    """The model of `model.path` with its optimiser. Collective.

    Raises LoadError, CheckpointError, or PartMissing for a library that the configuration names and that is missing.
    """
    check_implementation(config.trainer.optimizer.implementation)
    started, dtype = time.monotonic(), qwen3_vl.DTYPES[config.model.dtype]
    chunks = qwen3_vl.build(config.model.path, dtype=dtype, platform=platform, settings=model_settings(config))
    if not config.model.checkpoint:
        load_hf(chunks, config.model.path)
    wrapped = wrap(chunks)
    if config.model.checkpoint:
        load_weights(Path(config.model.checkpoint), wrapped)
    rl = optimization(wrapped, config.trainer.optimizer, config.trainer.optimizer_steps, dtype)
    log.info("model loaded in %.1f s", time.monotonic() - started)
    return Learner(wrapped, chunks[0].unpadded_vocab_size, rl)


def model_settings(config: Config) -> Settings:
    """How the configuration wants the model computed."""
    trainer = config.trainer
    return Settings(
        sequence_parallel=trainer.sequence_parallel,
        recompute=cast(settings.Recompute, trainer.recompute),
        layers=cast(settings.Layers, trainer.layers),
        attention=cast(settings.Attention, trainer.attention),
        train_vision=trainer.train_vision,
    )


def make_builder(config: Config, platform: Platform) -> RowBuilder:
    """What makes this rank's rows. The process groups must exist."""
    trainer = config.trainer
    return RowBuilder(
        processor=Processor.load(config.model.path),
        limit=trainer.tokens_per_microbatch,
        device=platform.device,
        replica=parallel_state.get_data_parallel_rank(),
        replicas=parallel_state.get_data_parallel_world_size(),
        cost=Cost.of_model(describe(config.model.path), trainer.train_vision),
        # Megatron's interleaved schedule takes rows in rounds of one per stage.
        multiple=trainer.pipeline_parallel if trainer.virtual_pipeline > 1 else 1,
        merge=trainer.merge_prefixes,
        pixels=parallel_state.is_pipeline_first_stage(ignore_virtual=True),
        image_rank=get_pg_rank(parallel_state.get_tensor_and_context_parallel_group()),
        image_ranks=trainer.tensor_parallel * trainer.context_parallel,
        context_rank=parallel_state.get_context_parallel_rank(),
        context_ranks=trainer.context_parallel,
        token_multiple=trainer.tensor_parallel if trainer.sequence_parallel else 1,
    )


def with_pixels_ahead(builder: RowBuilder, config: Config, rank: int) -> RowBuilder:
    """The builder with workers that make its pixels ahead, if it makes any and the configuration wants workers.

    Call from the main thread, with which the workers die. Raises ProcessError.
    """
    settings = config.trainer
    if not settings.pixel_workers or not builder.pixels:
        return builder
    arena, log_file = Arena(settings.pixel_mib * 2**20), config.run_folder / "logs" / f"pixels-{rank}.log"
    pool = PatchPool(settings.pixel_workers, arena, builder.processor.cut, log_file)
    return replace(builder, preparation=Preparation(builder.processor, pool, arena, builder.device, builder.waiting))
