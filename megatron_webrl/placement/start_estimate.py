"""Estimate how long a job reads weights from the shared folder at its start, and writes a checkpoint to it.

A checkpoint holds the optimizer, too, which a resumed job reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_webrl.config.schema import Config
from megatron_webrl.placement.memory_estimate import DTYPE_BYTES, GIB, OPTIMIZER_BYTES

OTHER_SECONDS = 300.0  # of a start without reading: imports, communicators, compilation, captured graphs
STORAGE_GB_PER_SECOND = 2.0  # speed at which all nodes together read or write the shared folder
SAFETY_FACTOR = 2.0  # other jobs use the same folder


@dataclass(frozen=True)
class StartEstimate:
    """Bytes that all nodes of a job read together."""

    new_bytes: int
    resumed_bytes: int
    gb_per_second: float  # 1e9 bytes

    @property
    def new_seconds(self) -> float:
        return self.new_bytes / (1e9 * self.gb_per_second)

    @property
    def resumed_seconds(self) -> float:
        return self.resumed_bytes / (1e9 * self.gb_per_second)

    @property
    def needed_timeout_seconds(self) -> float:
        """A safe run.startup_timeout_seconds."""
        return OTHER_SECONDS + SAFETY_FACTOR * self.resumed_seconds

    @property
    def needed_save_seconds(self) -> float:
        """A safe trainer.checkpoint.timeout_seconds: a checkpoint has the bytes that a resumed job reads."""
        return SAFETY_FACTOR * self.resumed_seconds


def estimate_start(config: Config, parameters: int) -> StartEstimate:
    """Estimate the start of a job with a model of so many parameters.

    Training reads one copy: data-parallel rank 0 of the trainer, from which the others and the engines get theirs. An
    evaluation reads a copy for each node, whose engines share the page cache.
    """
    speed = STORAGE_GB_PER_SECOND
    if config.evaluation.only:
        size = parameters * DTYPE_BYTES[config.engine_dtype] * config.cluster.nodes
        return StartEstimate(size, size, speed)
    size = DTYPE_BYTES[config.model.dtype]
    return StartEstimate(parameters * size, parameters * (size + OPTIMIZER_BYTES[config.model.dtype]), speed)


def describe_start(config: Config, estimate: StartEstimate) -> str:
    """The estimate of the start in one line, with the timeout to set if that of the configuration is too short."""
    resumed = ""
    if estimate.resumed_bytes > estimate.new_bytes:
        resumed = f"; resumed {_short(estimate.resumed_bytes / GIB)} GiB, {_short(estimate.resumed_seconds)} s"
    text = (
        f"start: reads {_short(estimate.new_bytes / GIB)} GiB from the shared folder, about "
        f"{_short(estimate.new_seconds)} s at {estimate.gb_per_second:g} GB/s{resumed}"
    )
    return text + _if_short(
        "run.startup_timeout_seconds", config.run.startup_timeout_seconds, estimate.needed_timeout_seconds
    )


def describe_save(config: Config, estimate: StartEstimate) -> str:
    """The estimate of a checkpoint in one line, as `describe_start`; empty if no trainer runs."""
    if config.evaluation.only:
        return ""
    text = f"checkpoint: writes {_short(estimate.resumed_bytes / GIB)} GiB, about {_short(estimate.resumed_seconds)} s"
    limit = config.trainer.checkpoint.timeout_seconds
    return text + _if_short("trainer.checkpoint.timeout_seconds", limit, estimate.needed_save_seconds)


def _if_short(name: str, seconds: float, needed: float) -> str:
    return "" if seconds >= needed else f"; {name}={seconds:g} is short, set it to {needed:.0f} or more"


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
