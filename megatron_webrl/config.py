"""The typed configuration: every setting with its meaning, default and limits, in one place.

`load` reads a YAML file and command-line overrides with OmegaConf, checks every value and every
combination, and raises ConfigError with one line that names the key, the value, the limit and the way
out. It starts nothing and imports neither torch, megatron nor vLLM. docs/configuration.md is made from here.
"""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_webrl.config_acting import (
    BrowserConfig,
    ContextConfig,
    LatencyConfig,
    RolloutConfig,
    SamplerConfig,
    TasksConfig,
)
from megatron_webrl.config_cluster import ClusterConfig
from megatron_webrl.config_loss import LossConfig, RewardConfig
from megatron_webrl.config_setting import setting

__all__ = [
    "BrowserConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "ConfigError",
    "ContextConfig",
    "EvaluationConfig",
    "LatencyConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplerConfig",
    "TasksConfig",
    "flat",
    "load",
    "read",
    "save",
]


class ConfigError(ValueError):
    """A configuration that cannot run. The message is one line and says what to change."""


@dataclass
class RunConfig:
    name: str = setting("run", "Name of the run; its files go to <directory>/<name>.")
    directory: str = setting("runs", "Folder that holds all runs and the MLflow database.")
    seed: int = setting(0, "Seed of task sampling, of the order of samples and of the engines.", low=0)
    resume: bool = setting(False, "Continue from the newest checkpoint of this run; without one, refuse.")
    start_seconds: float = setting(600.0, "Limit for a role to come up.", above=0)
    lost_seconds: float = setting(20.0, "A role that sends no heartbeat for so long is lost.", above=0)
    hang_seconds: float = setting(
        900.0,
        "A rollout worker that makes no progress for so long, or the trainer once no rank of it does, hangs: all roles "
        "show their stacks in their logs, and it is killed; 0: never.",
        low=0,
    )
    restarts: int = setting(3, "Times that each rollout worker is started again after it ended badly.", low=0)
    requeues: int = setting(
        3, "Times that Slurm may start a job again without a newer checkpoint, before the job fails.", low=0
    )
    trainer_restarts: int = setting(
        3,
        "Times in a row that all trainer ranks are started again, from the newest checkpoint, after one ended badly; a "
        "checkpoint that is completed in between lets them count anew. 0: the job ends.",
        low=0,
    )


@dataclass
class ModelConfig:
    path: str = setting("", "Hugging Face folder of a Qwen3-VL model.")
    checkpoint: str = setting(
        "", "Megatron checkpoint to start from; empty: the weights of model.path. Only its weights are taken."
    )
    dtype: str = setting("float32", "Type of weights and activations.", choices=("float32", "bfloat16"))
    platform: str = setting(
        "auto", "Where to compute; auto takes CUDA if there is a GPU.", choices=("auto", "cpu", "cuda")
    )


@dataclass
class OptimizerConfig:
    learning_rate: float = setting(5e-6, "Peak learning rate of Adam.", above=0)
    min_learning_rate_ratio: float = setting(0.1, "The schedule ends at this share of the peak.", low=0, high=1)
    schedule: str = setting("cosine", "Decay after the warm-up.", choices=("cosine", "linear", "constant"))
    warmup_fraction: float = setting(0.0167, "Share of all optimiser steps with a linearly rising rate.", low=0, high=1)
    weight_decay: float = setting(0.01, "Decoupled weight decay.", low=0)
    beta1: float = setting(0.9, "Adam's first moment.", low=0, high=1)
    beta2: float = setting(0.999, "Adam's second moment.", low=0, high=1)
    epsilon: float = setting(1e-8, "Adam's epsilon.", above=0)
    clip_norm: float = setting(1.0, "Gradients are scaled down to this global norm.", above=0)
    implementation: str = setting(
        "auto",
        "Whose Adam; auto: Transformer Engine's, else apex's, else torch's, whichever is installed.",
        choices=("auto", "torch", "transformer_engine", "apex"),
    )


@dataclass
class CheckpointConfig:
    every: int = setting(0, "Updates between checkpoints; 0: only at the end.", low=0)
    asynchronous: bool = setting(True, "Train on while a checkpoint is written, by a process of its own.")
    keep: int = setting(2, "Checkpoints that stay: the last so many.", low=1)
    keep_every: int = setting(0, "Versions that are a multiple of this stay as well; 0: none.", low=0)
    seconds: float = setting(900.0, "Limit of writing one checkpoint.", above=0)


@dataclass
class WarmStartConfig:
    demonstrations: int = setting(0, "Scripted episodes to imitate before RL; 0 for none.", low=0)
    file: str = setting("", "Where they come from, by `webrl demonstrate`; empty: the first worker makes them anew.")
    haste: float = setting(
        0.0,
        "Chance that a step of a demonstration submits at once where the page has a button for it. Failed episodes are "
        "imitated, too, if it is not 0.",
        low=0, high=1,
    )  # fmt: skip
    epochs: int = setting(1, "Passes over the demonstrations.", low=1)
    samples_per_update: int = setting(32, "Steps in one optimiser step.", low=1)
    learning_rate: float = setting(1e-3, "Peak learning rate of the warm start.", above=0)
    seconds: float = setting(3600.0, "Limit of the whole warm start, demonstrations included.", above=0)


@dataclass
class TrainerConfig:
    tensor_parallel: int = setting(1, "Ranks that share each layer.", low=1)
    pipeline_parallel: int = setting(1, "Stages of layers, each on its own ranks.", low=1)
    virtual_pipeline: int = setting(1, "Chunks of layers of one stage; more of them leave a stage idle less.", low=1)
    expert_parallel: int = setting(1, "Ranks that share out the experts, taken from tensor and data parallel.", low=1)
    expert_tensor_parallel: int = setting(1, "Ranks that share each expert.", low=1)
    context_parallel: int = setting(1, "Ranks that share the tokens of each row; in attention, its heads.", low=1)
    data_parallel: int = setting(1, "Replicas that share each batch; 0: as many as cluster.* has GPUs for.", low=0)
    sequence_parallel: bool = setting(
        True, "Share tokens out over tensor-parallel ranks between the split parts of a layer."
    )
    recompute: str = setting(
        "none",
        "What the backward pass computes again to save memory: nothing, attention and MLP, or whole layers.",
        choices=("none", "selective", "full"),
    )
    layers: str = setting(
        "local",
        "Linear layers and norms: megatron-core's or Transformer Engine's.",
        choices=("local", "transformer_engine"),
    )
    attention: str = setting(
        "sdpa", "Attention: PyTorch's, or flash-attn's kernel for packed rows.", choices=("sdpa", "flash")
    )
    updates: int = setting(5, "Updates in all, those before a resume included; 0: the warm start alone.", low=0)
    groups_per_update: int = setting(8, "Groups trained in one update.", low=1)
    epochs: int = setting(1, "Passes over an update's batch.", low=1)
    minibatches: int = setting(1, "Optimiser steps in one pass.", low=1)
    tokens_per_microbatch: int = setting(16384, "Tokens in one packed row.", low=1)
    merge_prefixes: bool = setting(True, "Compute steps whose prompts go on from each other as one sequence.")
    train_vision: bool = setting(True, "Train the vision tower; otherwise it stays as it is.")
    pixel_workers: int = setting(
        2,
        "Processes of each trainer rank that decode and cut screenshots ahead of the rows that need them; 0: the rank "
        "does it itself, before the first row.",
        low=0,
    )
    pixel_mib: int = setting(512, "Shared memory for screenshots that were cut ahead, of each trainer rank.", low=1)
    zero_variance_groups: str = setting(
        "drop",
        "Groups whose rewards are all equal: drop and replace, or keep (they carry no gradient).",
        choices=("drop", "keep"),
    )
    batch_seconds: float = setting(900.0, "Limit for the groups of one update to arrive.", above=0)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps of the whole run, at most, and one at least."""
        return max(1, self.updates * self.epochs * self.minibatches)


@dataclass
class EvaluationConfig:
    episodes: int = setting(30, "Held-out tasks of each environment.", low=1)
    samples: int = setting(1, "Episodes of each task; more than one for pass@k.", low=1)
    temperature: float = setting(0.0, "Sampling temperature of evaluations; 0: the likeliest token.", low=0)
    before: bool = setting(False, "Evaluate what the run starts from.")
    after: bool = setting(False, "Evaluate what the last update made.")
    blank_images: bool = setting(
        False, "With after: once more, every screenshot blank, to see how much the policy goes by the pixels."
    )
    every: int = setting(0, "Updates between evaluations beside the training; 0: none.", low=0)
    slots: int = setting(4, "Episodes of an evaluation that one worker runs at a time beside the training.", low=1)
    seconds: float = setting(7200.0, "Limit of one evaluation; episodes not done by then count as missing.", above=0)


@dataclass
class RingConfig:
    mib: int = setting(1024, "Size of the shared-memory ring of one node.", low=1)
    full_seconds: float = setting(900.0, "Limit for a writer to wait for room.", above=0)
    exchange_seconds: float = setting(
        120.0, "Limit of one message between trainer ranks of several nodes about what their rings hold.", above=0
    )


@dataclass
class ControlConfig:
    host: str = setting("127.0.0.1", "Address of the control plane.")
    port: int = setting(0, "Port of the control plane; 0: any free one.", low=0, high=65535)


@dataclass
class WeightsConfig:
    bucket_mib: int = setting(512, "Largest extra memory of one rank during a transfer.", low=1)
    seconds: float = setting(300.0, "Limit of one weight transfer, and of joining for it.", above=0)
    caches: str = setting(
        "reset",
        "What an update does to an engine's caches: reset drops them and running requests compute their context again; "
        "salt leaves old entries to running requests, out of reach of later ones.",
        choices=("reset", "salt"),
    )
    verify: bool = setting(False, "Compare checksums of every slice on both sides in each transfer.")


@dataclass
class TrackingConfig:
    experiment: str = setting("megatron_webrl", "MLflow experiment.")
    uri: str = setting("", "MLflow tracking address; empty: MLFLOW_TRACKING_URI, else SQLite in the run directory.")
    sample_trajectories: int = setting(2, "Trajectories with screenshots stored per update.", low=0)
    keep_records: bool = setting(
        False, "Store all groups that each update was trained on in records/ of the run; they are never deleted."
    )


@dataclass
class Config:
    """One run, whole."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    browser: BrowserConfig = field(default_factory=BrowserConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    ring: RingConfig = field(default_factory=RingConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def run_folder(self) -> Path:
        """Folder of this run's files."""
        return Path(self.run.directory) / self.run.name

    @property
    def demonstrations_path(self) -> Path:
        """Where the demonstrations of the warm start are, or where the first worker leaves them for the trainer."""
        file = self.trainer.warm_start.file
        return Path(file) if file else self.run_folder / "demonstrations.records"

    @property
    def records_folder(self) -> Path:
        """Where the groups of every update are, a file a version, if they are kept."""
        return self.run_folder / "records"

    @property
    def reference_path(self) -> Path:
        """Where the weights that a warm start ended with lie, if the loss refers to them."""
        return self.run_folder / "reference"

    @property
    def tracking_uri(self) -> str:
        """tracking.uri, else MLFLOW_TRACKING_URI, else SQLite in the folder of all runs."""
        database = Path(self.run.directory).absolute() / "mlflow.db"
        return self.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{database}"

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the rollout workers."""
        return tuple(f"rollout-{worker}" for worker in range(self.rollout.engines))

    @property
    def staleness(self) -> int:
        """Versions that the oldest token of a trained group may lag behind, by mode."""
        return {"async": self.rollout.max_staleness, "one_step_off": 1, "sync": 0}[self.rollout.mode]

    @property
    def trainer_patience(self) -> float:
        """Seconds beyond run.lost_seconds that workers give a silent trainer to be started again."""
        return self.run.start_seconds if self.run.trainer_restarts else 0.0

    @property
    def engine_ranks(self) -> int:
        """Processes of one engine."""
        return self.rollout.tensor_parallel * self.rollout.pipeline_parallel

    @property
    def engine_dtype(self) -> str:
        """Type of the engine's weights."""
        return self.model.dtype if self.rollout.dtype == "auto" else self.rollout.dtype

    @property
    def trainer_ranks(self) -> int:
        """Processes of the trainer role."""
        trainer = self.trainer
        replica = trainer.tensor_parallel * trainer.pipeline_parallel * trainer.context_parallel
        return replica * trainer.data_parallel


def load(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read, override, and check a configuration. Raises ConfigError."""
    from megatron_webrl.config_checks import check

    config = read(path, overrides)
    check(config)
    return config


def read(path: str | Path | None, overrides: list[str] | None = None) -> Config:
    """Read a configuration, or take the defaults, and check types and keys only. Raises ConfigError."""
    path = None if path is None else Path(path)
    if path is not None and not path.is_file():
        raise ConfigError(f"configuration {path} is not a file")
    for override in overrides or []:
        if "=" not in override:
            raise ConfigError(f"override {override!r} is not of the form key=value")
    try:
        file = OmegaConf.load(path) if path is not None else OmegaConf.create({})
        if not isinstance(file, DictConfig):
            raise ConfigError(f"{path} does not hold a mapping of sections")
        merged = OmegaConf.merge(OmegaConf.structured(Config), file, OmegaConf.from_dotlist(list(overrides or [])))
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error, path)) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    assert isinstance(config, Config)
    from megatron_webrl.config_layout import fill_cluster

    fill_cluster(config)
    return config


def save(config: Config, path: Path) -> None:
    """Write the resolved configuration as YAML that `load` reads back."""
    path.write_text(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """The settings as a flat dictionary of dotted keys."""
    result: dict[str, Any] = {}
    for spec in dataclasses.fields(config):
        value, key = getattr(config, spec.name), f"{prefix}{spec.name}"
        result |= flat(value, key + ".") if dataclasses.is_dataclass(value) else {key: value}
    return result


def _one_line(error: OmegaConfBaseException, path: Path | None) -> str:
    message = str(error).splitlines()[0]
    key = error.full_key or error.key
    if "not in" in message and key is not None:
        place = f"{path} or an override" if path is not None else "an override"
        return f"unknown key {key} in {place}; docs/configuration.md lists all keys"
    return f"{key}: {message}" if key is not None else message
