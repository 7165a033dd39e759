"""The learner and the row builder that a configuration describes."""

from __future__ import annotations

import logging
import time

from megatron.core import parallel_state

from megatron_webrl.config import Config
from megatron_webrl.model import qwen3_vl
from megatron_webrl.model.load import load_hf
from megatron_webrl.model.platform import Platform
from megatron_webrl.model.processing import Processor
from megatron_webrl.trainer.learner import Learner
from megatron_webrl.trainer.optimizer import optimization, wrap
from megatron_webrl.trainer.rows import RowBuilder

log = logging.getLogger(__name__)


def make_learner(config: Config, platform: Platform) -> Learner:
    """The model of `model.path` with its optimiser. Collective."""
    started, dtype = time.monotonic(), qwen3_vl.DTYPES[config.model.dtype]
    model = qwen3_vl.build(config.model.path, dtype=dtype, platform=platform, train_vision=config.trainer.train_vision)
    load_hf(model, config.model.path)
    wrapped = wrap(model)
    rl = optimization([wrapped], config.trainer.optimizer, config.trainer.optimizer_steps, dtype)
    log.info("model loaded in %.1f s", time.monotonic() - started)
    return Learner([wrapped], model.unpadded_vocab_size, rl)


def make_builder(config: Config, platform: Platform) -> RowBuilder:
    """What makes this rank's rows. The process groups must exist."""
    return RowBuilder(
        processor=Processor.load(config.model.path),
        limit=config.trainer.tokens_per_microbatch,
        device=platform.device,
        replica=parallel_state.get_data_parallel_rank(),
        replicas=parallel_state.get_data_parallel_world_size(),
    )
