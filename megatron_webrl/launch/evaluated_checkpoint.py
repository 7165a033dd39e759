"""The checkpoint that `webrl eval` evaluates, and the configuration of its evaluation on one or more nodes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from megatron_webrl.config.load import parse_config, resolve_cluster_sizes
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.tasks import FileTasksConfig
from megatron_webrl.launch.validation import check_config
from megatron_webrl.model.convert.conversion import HF_FOLDER, ConversionOptions, find_checkpoint, megatron_to_hf
from megatron_webrl.track.latest_checkpoint import FALLBACK_PREFIX, fallback_links, find_latest_checkpoint
from megatron_webrl.util.text import metric_label

SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class EvaluatedCheckpoint:
    """A Hugging Face folder, or a Megatron checkpoint that is converted to one for the engines."""

    path: Path
    is_megatron: bool
    version: int  # policy version of a run's checkpoint; 0 otherwise

    @classmethod
    def resolve(cls, path: Path) -> EvaluatedCheckpoint:
        """Resolve a path: a Hugging Face folder, a checkpoint, or a run's newest checkpoint. Raises ConfigError."""
        if (path / "config.json").is_file():
            return cls(path, is_megatron=False, version=0)
        try:
            checkpoint = find_checkpoint(newest_in_run(path) or path)
        except ValueError as error:
            raise ConfigError(
                f"{path} is neither a Hugging Face folder (no config.json) nor a checkpoint: {error}"
            ) from None
        state = checkpoint / "state.json"
        return cls(checkpoint, True, json.loads(state.read_text())["version"] if state.is_file() else 0)

    @property
    def run_config_path(self) -> Path:
        """Configuration of the run that owns the checkpoint. Raises ConfigError without one."""
        link = self.path.absolute().parent.parent
        in_fallback = link.name.startswith(FALLBACK_PREFIX) and link.is_symlink()
        run = link.parent if in_fallback else self.path.resolve().parent.parent
        path = run / "config.yaml"
        if not self.is_megatron or not path.is_file():
            raise ConfigError(f"{self.path} is not in a run's checkpoints folder; name a configuration after it")
        return path

    def convert(self, folder: Path) -> None:
        """Convert a Megatron checkpoint to a Hugging Face folder. Raises ConfigError for incomplete weights.

        SIGINT and SIGTERM raise SystemExit meanwhile, which leaves no incomplete folder.
        """
        before = {number: signal.signal(number, _exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            megatron_to_hf(self.path, folder, SHARD_BYTES, ConversionOptions())
        except ValueError as error:
            raise ConfigError(str(error)) from error
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def newest_in_run(folder: Path) -> Path | None:
    """A run's newest checkpoint, one in a fallback folder by way of the run's link to it; None without one.

    `folder`: of the run, or its `checkpoints`.
    """
    if folder.name == "checkpoints":
        folder = folder.parent
    newest = find_latest_checkpoint(folder)
    for link in fallback_links(folder):
        if newest is not None and newest.is_relative_to(link.resolve()):
            return link / newest.relative_to(link.resolve())
    return newest


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def evaluation_config(checkpoint: EvaluatedCheckpoint, arguments: Sequence[str], nodes: int = 1) -> Config:
    """Like `parse_evaluation_config`, with all checks of a configuration. Raises ConfigError."""
    config = parse_evaluation_config(checkpoint, arguments, nodes)
    check_config(config)
    return config


def parse_evaluation_config(checkpoint: EvaluatedCheckpoint, arguments: Sequence[str], nodes: int = 1) -> Config:
    """Parse `arguments`: a file (default: the run's own), then overrides; it has its own folder. Raises ConfigError.

    A configuration of a training job is changed to one without a trainer, whose engines fill `nodes` nodes.
    """
    file = Path(arguments[0]) if arguments and "=" not in arguments[0] else None
    overrides = list(arguments if file is None else arguments[1:])
    config = parse_config(
        file or checkpoint.run_config_path, ["evaluation.only=true", f"cluster.nodes={nodes}", *overrides]
    )
    chosen = any(override.startswith("rollout.engines=") for override in overrides)
    if not chosen and (config.cluster.gpus_per_node or config.cluster.nodes > 1):
        config.rollout.engines = 0  # the file may hold the number of a training job
        resolve_cluster_sizes(config)
    config.run = replace(config.run, name=_run_name(config.run.name, checkpoint), resume=False)
    folder = checkpoint.path / HF_FOLDER if checkpoint.is_megatron else checkpoint.path
    config.model = replace(config.model, path=str(folder), checkpoint="")
    warm_start = config.trainer.warm_start
    config.trainer.warm_start = replace(warm_start, demonstrations=0, demonstrations_file="")
    if isinstance(config.tasks, FileTasksConfig) and config.tasks.from_files:
        config.tasks.train_file = ""  # not read; its machine may not have it
    config.evaluation = replace(config.evaluation, before=False, after=True, every=0)
    return config


def _run_name(name: str, checkpoint: EvaluatedCheckpoint) -> str:
    """A name that evaluations of other checkpoints and other Slurm jobs do not have; a requeued job has its own."""
    parts = [name, "evaluation", metric_label(checkpoint.path.absolute().name), os.environ.get("SLURM_JOB_ID", "")]
    return "-".join(filter(None, parts))


def check_output_file(file: Path | None) -> None:
    """Raise ConfigError if the folder of the output file does not exist."""
    if file is not None and not file.absolute().parent.is_dir():
        raise ConfigError(f"--json={file}: {file.absolute().parent} is not a folder")
