"""Everything about a configuration that can be known to fail before anything starts."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from megatron_webrl.config import (
    BrowserConfig,
    Config,
    ConfigError,
    LatencyConfig,
    LossConfig,
    RolloutConfig,
    TrainerConfig,
)
from megatron_webrl.config_layout import check_layout
from megatron_webrl.placement import check_cluster
from megatron_webrl.sampling.checks import check_tasks
from megatron_webrl.types import EXTRA_KINDS, TAB_KINDS

SHARED_MEMORY = Path("/dev/shm")
_DIMENSIONS = {
    "text_config": (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size",
    ),
    "vision_config": (
        "depth", "hidden_size", "intermediate_size", "num_heads", "patch_size", "temporal_patch_size",
        "spatial_merge_size", "out_hidden_size", "num_position_embeddings", "deepstack_visual_indexes",
    ),
}  # fmt: skip


# Settings of browser.* that only the process with the browsers reads.
OF_NODES = (
    "processes", "executable", "keep_pages", "open_web", "allow", "deny", "ports", "max_requests", "max_mib",
    "request_seconds",
)  # fmt: skip


def check(config: Config) -> None:
    """Check every limit and combination that can be known before anything starts. Raises ConfigError."""
    check_limits(config, "")
    if not config.run.name or "/" in config.run.name or config.run.name.startswith("."):
        raise ConfigError(f"run.name={config.run.name!r} is not a plain folder name")
    check_layout(config, model_description(config.model.path))
    _check_packages(config.trainer)
    check_cluster(config)
    _check_start(config)
    _check_hang(config)
    _check_warm_start(config)
    _check_rollout(config)
    _check_evaluation(config)
    _check_ring(config)
    if config.run.resume and not (config.run_folder / "checkpoints" / "latest").is_file():
        raise ConfigError(
            f"run.resume=true but {config.run_folder}/checkpoints holds no complete checkpoint; set run.resume=false"
        )


def _check_hang(config: Config) -> None:
    """What may last long must not look like a hang."""
    joining = 2 * config.weights.seconds + 60  # twice the limit: a link is formed, then both sides compare their plans
    for name, seconds in (("run.start_seconds", config.run.start_seconds), ("twice weights.seconds, and 60", joining)):
        if 0 < config.run.hang_seconds <= seconds:
            raise ConfigError(
                f"run.hang_seconds={config.run.hang_seconds:g} is not above {name}, {seconds:g}, for which a role may "
                "be silent; raise it, or set it to 0 for no limit"
            )


def check_farm(config: Config) -> None:
    """The same for what a node of a browser farm takes of a configuration. Raises ConfigError."""
    check_limits(config, "")
    _check_browser(config)


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


def check_limits(config: Any, prefix: str) -> None:
    """Refuse values outside of what their settings allow. Raises ConfigError."""
    for spec in dataclasses.fields(config):
        key, value, limit = prefix + spec.name, getattr(config, spec.name), spec.metadata
        if dataclasses.is_dataclass(value):
            check_limits(value, key + ".")
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


def _check_packages(trainer: TrainerConfig) -> None:
    for name, value, wanted, package in (
        ("layers", trainer.layers, "transformer_engine", "transformer_engine"),
        ("attention", trainer.attention, "flash", "flash_attn"),
    ):
        if value == wanted and importlib.util.find_spec(package) is None:
            raise ConfigError(f"trainer.{name}={value} needs the package {package}, which is not installed here")


def _check_start(config: Config) -> None:
    """A checkpoint to start from must hold weights, and of the same architecture where it says which."""
    checkpoint = Path(config.model.checkpoint)
    if not config.model.checkpoint:
        return
    if not (checkpoint / "megatron" / "metadata.json").is_file():
        raise ConfigError(
            f"model.checkpoint={checkpoint} holds no Megatron checkpoint (megatron/metadata.json); "
            "give a folder checkpoints/version-NNNNNN of a run, or what tools/hf_to_megatron.py wrote"
        )
    if not (checkpoint / "hf" / "config.json").is_file():
        return
    there, here = (_dimensions(model_description(path)) for path in (checkpoint / "hf", config.model.path))
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            raise ConfigError(
                f"model.checkpoint={checkpoint} has {name}={there.get(name)}, but model.path={config.model.path} has "
                f"{here.get(name)}; give the model that the checkpoint was made from"
            )


def _dimensions(description: dict[str, Any]) -> dict[str, Any]:
    """What the shapes of a model's weights follow from, by dotted name."""
    found = {"model_type": description["model_type"], "tie_word_embeddings": _tied(description)}
    for section, names in _DIMENSIONS.items():
        found |= {f"{section}.{name}": description[section].get(name) for name in names}
    found["text_config.num_experts"] = found["text_config.num_experts"] or description["text_config"].get(
        "num_local_experts"
    )
    return found


def _tied(description: dict[str, Any]) -> bool:
    return bool(description.get("tie_word_embeddings", description["text_config"].get("tie_word_embeddings", False)))


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
    if rollout.group_size < 2 and trainer.loss.name != "raft":
        raise ConfigError("rollout.group_size=1 gives no baseline; use at least 2, or trainer.loss.name=raft")
    _check_loss(config)
    check_tasks(config.tasks)
    if rollout.context.policy == "append" and rollout.context.rounds == 1:
        raise ConfigError(
            "rollout.context.rounds=1 leaves no room to append to (rollout.context.policy=append); set rounds to at "
            "least 2, or policy to sliding"
        )
    if rollout.mode != "async" and rollout.max_staleness not in (config.staleness, RolloutConfig().max_staleness):
        raise ConfigError(
            f"rollout.max_staleness={rollout.max_staleness} has no meaning with rollout.mode={rollout.mode}, whose "
            f"groups lag {config.staleness} behind; leave it out, or set rollout.mode=async"
        )
    _check_browser(config)


def _check_warm_start(config: Config) -> None:
    settings = config.trainer.warm_start
    if settings.haste and config.tasks.source != "miniwob":
        raise ConfigError(
            f"trainer.warm_start.haste={settings.haste}, but only scripts of tasks.source=miniwob submit too early; "
            "set it to 0"
        )
    if not settings.file:
        return
    if not settings.demonstrations:
        raise ConfigError("trainer.warm_start.file has no effect with trainer.warm_start.demonstrations=0; set both")
    if not Path(settings.file).is_file():
        raise ConfigError(f"trainer.warm_start.file={settings.file} is not a file; write one with `webrl demonstrate`")


def _check_loss(config: Config) -> None:
    loss, reward, usual = config.trainer.loss, config.trainer.reward, LossConfig()
    if 0 < loss.dual_clip <= 1:
        raise ConfigError(
            f"trainer.loss.dual_clip={loss.dual_clip} would clip the ratio 1 itself; set it above 1, or 0 for none"
        )
    for name in ("raft_versions", "raft_power", "raft_drop_unchanged"):
        if loss.name != "raft" and (value := getattr(loss, name)) != getattr(usual, name):
            raise ConfigError(f"trainer.loss.{name}={value} has no effect with trainer.loss.name={loss.name}; use raft")
    if reward.length_penalty and reward.length_window > config.rollout.max_new_tokens:
        raise ConfigError(
            f"trainer.reward.length_window={reward.length_window} exceeds "
            f"rollout.max_new_tokens={config.rollout.max_new_tokens}; lower it"
        )
    stored = (config.reference_path / "megatron" / "metadata.json").is_file()
    if config.run.resume and loss.kl_coefficient and config.trainer.warm_start.demonstrations and not stored:
        raise ConfigError(
            f"trainer.loss.kl_coefficient={loss.kl_coefficient} refers to the weights after the warm start, but "
            f"{config.reference_path} does not hold them: a run stores them only if it begins with the penalty; "
            "set it to 0"
        )


def _check_evaluation(config: Config) -> None:
    evaluation = config.evaluation
    if evaluation.samples > 1 and evaluation.temperature == 0:
        raise ConfigError(
            f"evaluation.samples={evaluation.samples} with evaluation.temperature=0 repeats the same episode; set "
            "temperature above 0, or samples=1"
        )
    if evaluation.blank_images and not evaluation.after:
        raise ConfigError(
            "evaluation.blank_images=true has nothing to be compared with; set evaluation.after=true as well"
        )


def _check_browser(config: Config) -> None:
    browser = config.browser
    for name in browser.actions:
        if name not in EXTRA_KINDS:
            raise ConfigError(f"browser.actions={name} is not one of {', '.join(EXTRA_KINDS)}")
    if set(browser.actions) & set(TAB_KINDS) and "switch_tab" not in browser.actions:
        raise ConfigError(f"browser.actions={','.join(browser.actions)} has tabs but no switch_tab; add it")
    if browser.marks and config.trainer.warm_start.demonstrations:
        raise ConfigError(
            f"trainer.warm_start.demonstrations={config.trainer.warm_start.demonstrations}, but scripts act by "
            "coordinates; set demonstrations to 0, or browser.marks=false"
        )
    if browser.keep_pages and (browser.record or browser.replay):
        name = "record" if browser.record else "replay"
        raise ConfigError(
            f"browser.keep_pages={browser.keep_pages}, but with browser.{name} no page serves twice; set it to 0"
        )
    if browser.farm:
        _check_farm_settings(config)
    executable = browser.executable
    if executable and not shutil.which(executable):
        raise ConfigError(
            f"browser.executable={executable} is not an executable file; leave it empty to search for Chromium"
        )


def farm_addresses(text: str) -> tuple[str, ...]:
    """The addresses of a setting, separated by commas. Raises ConfigError."""
    found = []
    for part in text.split(","):
        address = part.strip().rstrip("/")
        try:
            parts = urlsplit(address)
            plain = parts.scheme in ("http", "https") and parts.hostname and not (parts.path or parts.query)
            plain = plain and (parts.port is None or parts.port > 0)
        except ValueError:
            plain = False
        if not plain:
            raise ConfigError(f"{part.strip()!r} is not an address such as http://node7:8700 (browser.farm)")
        found.append(address)
    return tuple(found)


def _check_farm_settings(config: Config) -> None:
    """With a farm some settings are those of its nodes: here they would have no effect. Raises ConfigError."""
    farm_addresses(config.browser.farm)
    usual = BrowserConfig()
    for name in OF_NODES:
        if (value := getattr(config.browser, name)) != getattr(usual, name):
            raise ConfigError(
                f"browser.{name}={value} has no effect with browser.farm={config.browser.farm}: its nodes have "
                "settings of their own; leave it out"
            )
    if config.tasks.latency != LatencyConfig():
        raise ConfigError(
            f"tasks.latency has no effect with browser.farm={config.browser.farm}: give it to the nodes instead"
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
