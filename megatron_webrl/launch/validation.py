"""Validation of a configuration before anything starts: of its settings, and of what this machine has for it.

Also on a machine that will not run it, such as a login node.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_webrl.config.advantage import OwnAdvantageConfig
from megatron_webrl.config.browser import check_browser_user
from megatron_webrl.config.import_path import named_in
from megatron_webrl.config.load import parse_config
from megatron_webrl.config.loss import OwnLossConfig
from megatron_webrl.config.schema import Config, TrackingConfig, check_combinations
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.config.trainer import TrainerConfig
from megatron_webrl.judge.protocols import find_protocol
from megatron_webrl.launch.run_folder import SHARED_MEMORY
from megatron_webrl.model import parameter_counts
from megatron_webrl.model.hf_config import read_model_config
from megatron_webrl.model.vision_language.routing_replay import check_routing_replay
from megatron_webrl.placement.memory_estimate import check_memory, check_parallel_layout, estimate_memory
from megatron_webrl.placement.placement import check_cluster
from megatron_webrl.tasks.evaluation_count import evaluation_task_indices
from megatron_webrl.track.latest_checkpoint import find_latest_checkpoint
from megatron_webrl.trainer.checkpoint.checkpoint_files import (
    CheckpointError,
    check_resumable,
    latest_checkpoint,
    needs_initial_weights,
)

if TYPE_CHECKING:
    from megatron_webrl.tasks.web_pages import WebPageSource

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
    config = parse_training_config(path, overrides)
    check_config(config)
    return config


def parse_training_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Read and override a configuration of a job with a trainer. Raises ConfigError."""
    config = parse_config(path, overrides)
    if config.evaluation.only:
        raise ConfigError("evaluation.only=true runs no trainer; evaluate with `webrl eval`, or set it to false")
    return config


def check_job(config: Config, *, require_browser: bool = True) -> None:
    """Check all that a job needs. Raises ConfigError."""
    check_config(config)
    check_tasks_and_browser(config, require_browser=require_browser)
    check_evaluators(config)
    check_own(config)


def check_config(config: Config) -> None:
    """Check all limits and combinations of settings, packages and files. Raises ConfigError."""
    check_settings(config, read_model_config(config.model.path))
    for check in MACHINE_CHECKS:
        check(config)


def check_settings(config: Config, description: dict[str, Any]) -> None:
    """Check what needs nothing of this machine. `description`: the model's config.json. Raises ConfigError."""
    check_combinations(config)
    check_parallel_layout(config, description)
    check_routing_replay(config, description)
    check_cluster(config)
    if config.cluster.colocate and config.model.platform != "cpu":
        check_memory(config, estimate_memory(config, description))  # else one role takes the memory of the other


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


def missing_packages(trainer: TrainerConfig) -> dict[str, str]:
    """Packages that settings of the trainer name and that are not installed here: setting by package."""
    named = (
        ("layers", trainer.layers, "transformer_engine", ("transformer_engine",)),
        ("attention", trainer.attention, "flash", ("flash_attn",)),
        ("optimizer.implementation", trainer.optimizer.implementation, "fused", ("transformer_engine", "apex")),
    )
    return {
        " or ".join(packages): f"trainer.{name}={value}"
        for name, value, wanted, packages in named
        if value == wanted and not any(map(importlib.util.find_spec, packages))
    }


def check_packages(trainer: TrainerConfig) -> None:
    """Check that the packages that settings of the trainer name are installed here. Raises ConfigError."""
    for package, named_by in missing_packages(trainer).items():
        raise ConfigError(f"{named_by} needs the package {package}, which is not installed here")


def check_sinks(tracking: TrackingConfig) -> None:
    """Check that the packages of tracking.also are installed here. Raises ConfigError."""
    for name in tracking.also:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"tracking.also={name} needs the package {name}, which is not installed here; "
                f"pip install 'megatron_webrl[{name}]'"
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


def _check_demonstrations(config: Config) -> None:
    settings = config.trainer.warm_start
    if settings.demonstrations_file and not Path(settings.demonstrations_file).is_file():
        raise ConfigError(
            f"trainer.warm_start.demonstrations_file={settings.demonstrations_file} is not a file; write one with "
            "`webrl demonstrate`"
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
    *(lambda config: check_packages(config.trainer), _check_start, _check_demonstrations, _check_ring, _check_resume),
    lambda config: check_browser_user(config.browser),
    lambda config: check_sinks(config.tracking),
)  # of what this machine has: packages, files, shared memory, the user


def check_tasks_and_browser(config: Config, *, require_browser: bool = True) -> None:
    """Check that the tasks exist, and the browser unless it runs on another machine. Raises ConfigError."""
    from megatron_webrl.tasks.mix import TaskMix
    from megatron_webrl.tasks.registry import make_source
    from megatron_webrl.tasks.web_pages import WebPageSource

    source = make_source(config.tasks)
    for each in source.sources.values() if isinstance(source, TaskMix) else [source]:
        if isinstance(each, WebPageSource):
            _check_websites(config, each)
    source.close()
    evaluation = config.evaluation
    if evaluation.before or evaluation.after or evaluation.every:
        evaluation_task_indices(config)
    if config.run.resume:
        _check_resumed_file(config)
    if config.trainer.warm_start.demonstrations:
        from megatron_webrl.rollout.demonstrations import check_scripted_policies

        check_scripted_policies(config)
    if config.browser.servers or not require_browser:
        return
    from megatron_webrl.browser.chromium import find_chromium
    from megatron_webrl.browser.errors import BrowserMissing

    try:
        find_chromium(config.browser.executable)
    except BrowserMissing as error:
        raise ConfigError(str(error)) from error


def check_evaluators(config: Config) -> None:
    """Check that evaluators exist, and that a judge has models, endpoints and keys. Raises ConfigError."""
    from megatron_webrl.judge.budget import LocalMeter
    from megatron_webrl.judge.evaluation import open_evaluator

    async def open_and_close() -> None:
        async with open_evaluator(config.judge, LocalMeter(config.judge.budget)):
            pass

    asyncio.run(open_and_close())


def check_own(config: Config) -> None:
    """Check what settings name by import path, but for tasks and evaluators. Raises ConfigError."""
    loss, advantage = config.trainer.loss, config.trainer.advantage
    if isinstance(loss, OwnLossConfig):  # imports torch and megatron-core
        from megatron_webrl.trainer.loss.objective import own_loss

        own_loss(loss)
    if isinstance(advantage, OwnAdvantageConfig):
        from megatron_webrl.trainer.credit.advantages import own_advantage_function

        own_advantage_function(advantage)
    if config.trainer.reward.function or any(key.startswith("rollout.") for key in named_in(config)):
        from megatron_webrl.rollout.contexts import context_class, response_form
        from megatron_webrl.rollout.episode_runner import agent_class, find_reward

        context_class(config.rollout.context)
        response_form(config.rollout.context)
        agent_class(config.rollout.agent)
        find_reward(config.trainer.reward)
    find_protocol(config.judge)


def _check_resumed_file(config: Config) -> None:
    """Check that the training file has the rows that it had when the run wrote its newest checkpoint."""
    from megatron_webrl.tasks.files.table import difference_from_checkpoint, task_file_digests

    checkpoint = find_latest_checkpoint(config.run_folder)
    if checkpoint is None or not (checkpoint / "state.json").is_file():
        return  # _check_resume names what is missing
    saved = json.loads((checkpoint / "state.json").read_text()).get("task_sampler")
    if difference := difference_from_checkpoint(saved, task_file_digests(config.tasks)):
        raise ConfigError(difference)


def _check_websites(config: Config, source: WebPageSource) -> None:
    """Check that pages may reach the websites of the tasks. Servers of `browser.servers` decide that themselves."""
    from megatron_webrl.tasks.sites.websites import is_offline_host

    browser, tasks, public = config.browser, config.tasks, source.public_website
    if browser.servers:
        return
    if public and not browser.open_web:
        raise ConfigError(
            f"tasks.source={tasks.source} has tasks on {public}, but browser.open_web=false lets no page reach it; set "
            "browser.open_web=true"
        )
    for website in source.local_websites:
        if not is_offline_host(website):
            raise ConfigError(f"tasks.source={tasks.source} has tasks on {website}, which is no offline website")
        if not tasks.offline_websites:
            raise ConfigError(
                f"tasks.source={tasks.source} has tasks on the offline website {website}; set "
                "tasks.offline_websites=true"
            )


def load_config_elsewhere(path: str | Path, overrides: Sequence[str]) -> tuple[Config, list[str]]:
    """Read and check a configuration; returns it, and what this machine lacks, which the job's nodes must have.

    The shapes of a released model are known without its files. Raises ConfigError for what is wrong on any machine.
    """
    config, lacking = parse_config(path, list(overrides)), []
    size = parameter_counts.size_from_path(config.model.path)
    if size is not None and not Path(config.model.path).is_dir():
        check_settings(config, parameter_counts.config_sections(size))
        lacking.append(f"model.path={config.model.path} is no folder here; its shapes are those of the released {size}")
    else:
        check_settings(config, read_model_config(config.model.path))
    packaged_tasks = not (config.tasks.from_files or config.tasks.from_import_path)  # the same on every machine
    check_tasks = partial(check_tasks_and_browser, require_browser=False)
    checks: tuple[Callable[[Config], None], ...] = (*MACHINE_CHECKS, check_evaluators, check_tasks, check_own)
    for check in checks:
        try:
            check(config)
        except ConfigError as error:
            if check is check_tasks and packaged_tasks:
                raise
            lacking.append(str(error))
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            what = {check_tasks: "tasks", check_own: "import paths"}.get(check, "evaluators")
            lacking.append(f"the package {package} is not installed here; {what} are not checked")
    return config, lacking
