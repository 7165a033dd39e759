"""The typed configuration: every setting with its meaning, default and limits, in one place.

`load` reads a YAML file and command-line overrides with OmegaConf, checks every value and every
combination, and raises ConfigError with one line that names the key, the value, the limit and the way
out. It starts nothing and imports neither torch, megatron nor vLLM. docs/configuration.md is made from here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

SHARED_MEMORY = Path("/dev/shm")


class ConfigError(ValueError):
    """A configuration that cannot run. The message is one line and says what to change."""


def setting(default: Any, help: str, *, low=None, high=None, above=None, choices=None) -> Any:
    """A configuration field: default, meaning, and inclusive limits (`above` is exclusive)."""
    limits = {"help": help, "low": low, "high": high, "above": above, "choices": choices}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=limits)
    return field(default=default, metadata=limits)


@dataclass
class RunConfig:
    name: str = setting("run", "Name of the run; its files go to <directory>/<name>.")
    directory: str = setting("runs", "Folder that holds all runs and the MLflow database.")
    seed: int = setting(0, "Seed of task sampling, of the order of samples and of the engines.", low=0)
    resume: bool = setting(False, "Continue from the newest checkpoint of this run; without one, refuse.")
    start_seconds: float = setting(600.0, "Limit for a role to come up.", above=0)
    lost_seconds: float = setting(20.0, "A role that sends no heartbeat for so long is lost.", above=0)


@dataclass
class ModelConfig:
    path: str = setting("", "Hugging Face folder of a Qwen3-VL model.")
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


@dataclass
class LossConfig:
    name: str = setting(
        "decoupled", "decoupled: clipped surrogate; raft: log-likelihood of successes.", choices=("decoupled", "raft")
    )
    normaliser: str = setting(
        "constant", "Weight of a trajectory's tokens.", choices=("constant", "per_trajectory", "token_mean")
    )
    k: int = setting(10, "The constant normaliser divides by k steps.", low=1)
    clip_low: float = setting(0.2, "Ratio is clipped from below at 1 - clip_low.", above=0, high=1)
    clip_high: float = setting(0.2, "Ratio is clipped from above at 1 + clip_high.", above=0)
    dual_clip: float = setting(3.0, "Bound of the surrogate where the advantage is negative.", above=1)
    behaviour_cap: float = setting(5.0, "Tokens whose proximal/behaviour weight exceeds this are masked.", above=1)


@dataclass
class WarmStartConfig:
    demonstrations: int = setting(0, "Scripted episodes to imitate before RL; 0 for none.", low=0)
    epochs: int = setting(1, "Passes over the demonstrations.", low=1)
    samples_per_update: int = setting(32, "Steps in one optimiser step.", low=1)
    learning_rate: float = setting(1e-3, "Peak learning rate of the warm start.", above=0)
    seconds: float = setting(3600.0, "Limit of the whole warm start, demonstrations included.", above=0)


@dataclass
class TrainerConfig:
    tensor_parallel: int = setting(1, "Ranks that share each layer.", low=1)
    data_parallel: int = setting(1, "Replicas that share each batch.", low=1)
    updates: int = setting(5, "Updates in all, those before a resume included.", low=1)
    groups_per_update: int = setting(8, "Groups trained in one update.", low=1)
    epochs: int = setting(1, "Passes over an update's batch.", low=1)
    minibatches: int = setting(1, "Optimiser steps in one pass.", low=1)
    tokens_per_microbatch: int = setting(16384, "Tokens in one packed row.", low=1)
    train_vision: bool = setting(True, "Train the vision tower; otherwise it stays as it is.")
    zero_variance_groups: str = setting(
        "drop",
        "Groups whose rewards are all equal: drop and replace, or keep (they carry no gradient).",
        choices=("drop", "keep"),
    )
    checkpoint_every: int = setting(0, "Updates between checkpoints; 0: only at the end.", low=0)
    batch_seconds: float = setting(900.0, "Limit for the groups of one update to arrive.", above=0)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps of the whole run, at most."""
        return self.updates * self.epochs * self.minibatches


@dataclass
class ContextConfig:
    rounds: int = setting(4, "Latest rounds kept with their screenshots; older ones become summary lines.", low=1)
    response_format: str = setting(
        "vanilla",
        "Fields before the tool call: none, Thought and Action, or Progress, Intention and Action.",
        choices=("bare", "vanilla", "progress"),
    )
    compact: bool = setting(False, "Short tool schema for models with a small window.")


@dataclass
class RolloutConfig:
    engines: int = setting(1, "Rollout workers, each with one vLLM engine.", low=1)
    tensor_parallel: int = setting(1, "GPUs (or CPU processes) of one engine.", low=1)
    group_size: int = setting(8, "Episodes that share a baseline.", low=1)
    groups_in_flight: int = setting(4, "Groups that one worker runs at a time.", low=1)
    max_staleness: int = setting(2, "Versions that the oldest token of a trained group may lag behind.", low=0)
    temperature: float = setting(1.0, "Sampling temperature.", above=0)
    max_new_tokens: int = setting(4096, "Response tokens of one step.", low=1)
    max_model_len: int = setting(16384, "Tokens of prompt and response together.", low=16)
    kv_cache_mib: int = setting(0, "Memory of the engine's KV cache; 0 leaves it to vLLM.", low=0)
    gpu_memory_utilization: float = setting(0.9, "Share of a GPU that vLLM may take.", above=0, high=1)
    step_seconds: float = setting(120.0, "Limit of one operation: a generation, a reset, an action.", above=0)
    episode_seconds: float = setting(2700.0, "Limit of one episode.", above=0)
    context: ContextConfig = field(default_factory=ContextConfig)


@dataclass
class TasksConfig:
    source: str = setting("miniwob", "Where tasks come from.", choices=("miniwob",))
    environments: list[str] = setting(["click-test"], "Environments of the source, sampled uniformly.")
    max_steps: int = setting(10, "Steps of one episode.", low=1)


@dataclass
class BrowserConfig:
    executable: str = setting("", "Chromium to run; empty: the first one found.")
    width: int = setting(1280, "Viewport width, pixels.", low=32)
    height: int = setting(768, "Viewport height, pixels.", low=32)
    screenshot: str = setting("jpeg", "Encoding of screenshots.", choices=("jpeg", "png"))
    quality: int = setting(80, "JPEG quality.", low=1, high=100)


@dataclass
class RingConfig:
    mib: int = setting(1024, "Size of the shared-memory ring of one node.", low=1)
    full_seconds: float = setting(900.0, "Limit for a writer to wait for room.", above=0)


@dataclass
class ControlConfig:
    host: str = setting("127.0.0.1", "Address of the control plane.")
    port: int = setting(0, "Port of the control plane; 0: any free one.", low=0, high=65535)


@dataclass
class WeightsConfig:
    bucket_mib: int = setting(512, "Largest extra memory of one transfer.", low=1)
    seconds: float = setting(300.0, "Limit of one weight transfer.", above=0)


@dataclass
class TrackingConfig:
    experiment: str = setting("megatron_webrl", "MLflow experiment.")
    uri: str = setting("", "MLflow tracking address; empty: MLFLOW_TRACKING_URI, else SQLite in the run directory.")
    sample_trajectories: int = setting(2, "Trajectories with screenshots stored per update.", low=0)


@dataclass
class Config:
    """One run, whole."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    browser: BrowserConfig = field(default_factory=BrowserConfig)
    ring: RingConfig = field(default_factory=RingConfig)
    control: ControlConfig = field(default_factory=ControlConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    @property
    def run_folder(self) -> Path:
        """Folder of this run's files."""
        return Path(self.run.directory) / self.run.name

    @property
    def demonstrations_path(self) -> Path:
        """Where the first worker leaves the warm start's demonstrations for the trainer."""
        return self.run_folder / "demonstrations.records"

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
    def transfer_ranks(self) -> int:
        """Ranks of the weight transfer group: the trainer's first, then each engine's in the order of workers."""
        return 1 + self.rollout.engines * self.rollout.tensor_parallel

    @property
    def trainer_ranks(self) -> int:
        """Processes of the trainer role."""
        return self.trainer.tensor_parallel * self.trainer.data_parallel


def load(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read, override, and check a configuration. Raises ConfigError."""
    config = read(path, overrides)
    check(config)
    return config


def read(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read a configuration and check types and keys only. Raises ConfigError."""
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"configuration {path} is not a file")
    for override in overrides or []:
        if "=" not in override:
            raise ConfigError(f"override {override!r} is not of the form key=value")
    try:
        file = OmegaConf.load(path)
        if not isinstance(file, DictConfig):
            raise ConfigError(f"{path} does not hold a mapping of sections")
        merged = OmegaConf.merge(OmegaConf.structured(Config), file, OmegaConf.from_dotlist(list(overrides or [])))
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error, path)) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    assert isinstance(config, Config)
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


def check(config: Config) -> None:
    """Check every limit and combination that can be known before anything starts. Raises ConfigError."""
    _check_limits(config, "")
    if not config.run.name or "/" in config.run.name or config.run.name.startswith("."):
        raise ConfigError(f"run.name={config.run.name!r} is not a plain folder name")
    _check_model(config)
    _check_rollout(config)
    _check_ring(config)
    if config.run.resume and not (config.run_folder / "checkpoints" / "latest").is_file():
        raise ConfigError(
            f"run.resume=true but {config.run_folder}/checkpoints holds no complete checkpoint; set run.resume=false"
        )


def model_description(path: str | Path) -> dict[str, Any]:
    """The model folder's config.json. Raises ConfigError if it is not a Qwen3-VL folder."""
    folder = Path(path)
    if not str(path):
        raise ConfigError("model.path is empty; give a Hugging Face folder, or make one with tools/make_tiny_model.py")
    if not folder.is_dir():
        raise ConfigError(
            f"model.path={path} is not a folder; give a Hugging Face folder, or make one with tools/make_tiny_model.py"
        )
    try:
        description = json.loads((folder / "config.json").read_text())
    except FileNotFoundError:
        raise ConfigError(f"model.path={path} holds no config.json; give a complete Hugging Face folder") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"model.path={path}: config.json is not valid JSON ({error})") from error
    if description.get("model_type") not in ("qwen3_vl", "qwen3_vl_moe"):
        raise ConfigError(
            f"model.path={path} holds model_type={description.get('model_type')!r}; "
            "only qwen3_vl and qwen3_vl_moe are known"
        )
    return description


def _check_limits(config: Any, prefix: str) -> None:
    for spec in dataclasses.fields(config):
        key, value, limit = prefix + spec.name, getattr(config, spec.name), spec.metadata
        if dataclasses.is_dataclass(value):
            _check_limits(value, key + ".")
            continue
        if limit.get("choices") and value not in limit["choices"]:
            raise ConfigError(f"{key}={value!r} is not one of {', '.join(limit['choices'])}")
        for name, broken, words in (
            ("low", lambda v, b: not v >= b, "must be at least"),
            ("high", lambda v, b: not v <= b, "must be at most"),
            ("above", lambda v, b: not v > b, "must be greater than"),
        ):
            if limit.get(name) is not None and broken(value, limit[name]):
                raise ConfigError(f"{key}={value} {words} {limit[name]}")


def _check_model(config: Config) -> None:
    description = model_description(config.model.path)
    text = description["text_config"]
    tp = config.trainer.tensor_parallel
    for name in ("num_attention_heads", "num_key_value_heads"):
        if text[name] % tp:
            raise ConfigError(
                f"trainer.tensor_parallel={tp} does not divide {name}={text[name]} of {config.model.path}; "
                f"choose a divisor of {text[name]}"
            )
    if description["model_type"] == "qwen3_vl_moe":
        raise ConfigError(
            f"model.path={config.model.path} is a mixture of experts; the trainer runs dense Qwen3-VL models only"
        )
    if text["num_attention_heads"] % config.rollout.tensor_parallel:
        raise ConfigError(
            f"rollout.tensor_parallel={config.rollout.tensor_parallel} does not divide "
            f"num_attention_heads={text['num_attention_heads']} of {config.model.path}"
        )
    if config.rollout.max_model_len > text["max_position_embeddings"]:
        raise ConfigError(
            f"rollout.max_model_len={config.rollout.max_model_len} exceeds "
            f"max_position_embeddings={text['max_position_embeddings']} of {config.model.path}"
        )


def _check_rollout(config: Config) -> None:
    rollout, trainer = config.rollout, config.trainer
    if rollout.max_new_tokens >= rollout.max_model_len:
        raise ConfigError(
            f"rollout.max_new_tokens={rollout.max_new_tokens} leaves no room for a prompt in "
            f"rollout.max_model_len={rollout.max_model_len}; lower it or raise max_model_len"
        )
    if rollout.max_model_len > trainer.tokens_per_microbatch:
        raise ConfigError(
            f"trainer.tokens_per_microbatch={trainer.tokens_per_microbatch} cannot hold a sample of "
            f"rollout.max_model_len={rollout.max_model_len} tokens; raise it or lower max_model_len"
        )
    if rollout.group_size < 2 and trainer.loss.name == "decoupled":
        raise ConfigError("rollout.group_size=1 gives no baseline; use at least 2, or trainer.loss.name=raft")
    if not config.tasks.environments:
        raise ConfigError("tasks.environments is empty; name at least one environment")
    executable = config.browser.executable
    if executable and not shutil.which(executable):
        raise ConfigError(
            f"browser.executable={executable} is not an executable file; leave it empty to search for Chromium"
        )


def _check_ring(config: Config) -> None:
    if not SHARED_MEMORY.is_dir():
        raise ConfigError(f"{SHARED_MEMORY} does not exist; mount a tmpfs there")
    status = os.statvfs(SHARED_MEMORY)
    size = status.f_blocks * status.f_frsize // 2**20
    if config.ring.mib > size:
        raise ConfigError(
            f"ring.mib={config.ring.mib} exceeds the {size} MiB of {SHARED_MEMORY}; lower it or enlarge {SHARED_MEMORY}"
        )


def _one_line(error: OmegaConfBaseException, path: Path) -> str:
    message = str(error).splitlines()[0]
    key = error.full_key or error.key
    if "not in" in message and key is not None:
        return f"unknown key {key} in {path} or an override; docs/configuration.md lists all keys"
    return f"{key}: {message}" if key is not None else message
