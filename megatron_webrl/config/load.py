"""Read a configuration: a YAML file and command-line overrides, merged by OmegaConf into the typed schema."""

from __future__ import annotations

import dataclasses
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.util import atomic_file
from megatron_webrl.util.text import first_line


def parse_config(path: str | Path | None, overrides: list[str] | None = None) -> Config:
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
    resolve_cluster_sizes(config)
    return config


def resolve_cluster_sizes(config: Config) -> None:
    """Replace trainer.data_parallel=0 and rollout.engines=0 by what fills the GPUs. Raises ConfigError.

    Without a trainer (evaluation.only) and without GPUs, each node gets the ranks of one tensor-parallel group.
    """
    cluster, trainer, rollout = config.cluster, config.trainer, config.rollout
    replica = trainer.tensor_parallel * trainer.pipeline_parallel * trainer.context_parallel
    if config.evaluation.only:
        trainer.data_parallel = trainer.data_parallel or 1  # of no rank
        if not cluster.gpus_per_node and not rollout.engines:
            rollout.engines = max(1, cluster.nodes // max(1, rollout.pipeline_parallel))
    for section, name, gpus, size in (
        (trainer, "data_parallel", config.trainer_gpus_per_node, replica),
        (rollout, "engines", config.engine_gpus_per_node, config.ranks_per_engine),
    ):
        if getattr(section, name) != 0:
            continue
        key = f"{'trainer' if section is trainer else 'rollout'}.{name}"
        if cluster.gpus_per_node == 0:
            raise ConfigError(
                f"{key}=0 asks cluster.* for a number, but cluster.gpus_per_node=0; give a number of at least 1"
            )
        found, left = divmod(cluster.nodes * gpus, size) if size > 0 else (0, 0)
        if found < 1 or left:
            raise ConfigError(
                f"{key}=0: {cluster.nodes} x {gpus} GPUs (cluster.nodes, and {_gpu_settings(config)}) cannot be "
                f"shared out by {size}; change these or the parallel sizes"
            )
        setattr(section, name, found)


def _gpu_settings(config: Config) -> str:
    """The settings that decide how many GPUs of a node a role has."""
    whole = f"cluster.gpus_per_node={config.cluster.gpus_per_node}"
    part = f"cluster.engine_gpus_per_node={config.cluster.engine_gpus_per_node}"
    return whole if config.evaluation.only or config.cluster.shared_gpus else f"{part} of {whole}"


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration as YAML that `load` reads back."""
    atomic_file.write_text(path, yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))


def flatten_config(config: Any, prefix: str = "") -> dict[str, Any]:
    """The settings as a flat dictionary of dotted keys."""
    result: dict[str, Any] = {}
    for spec in dataclasses.fields(config):
        value, key = getattr(config, spec.name), f"{prefix}{spec.name}"
        result |= flatten_config(value, key + ".") if dataclasses.is_dataclass(value) else {key: value}
    return result


def _one_line(error: OmegaConfBaseException, path: Path | None) -> str:
    message = first_line(error)
    key = error.full_key or error.key
    if "not in" in message and key is not None:
        place = f"{path} or an override" if path is not None else "an override"
        nearest = _nearest_key(key)
        hint = f"; did you mean {nearest}?" if nearest else ";"
        return f"unknown key {key} in {place}{hint} docs/configuration.md lists all keys"
    return f"{key}: {message}" if key is not None else message


def _nearest_key(key: str) -> str | None:
    """The key most like an unknown one: within its section if there is a similar name, else among all settings."""
    keys = list(flatten_config(Config()))
    prefix = key[: key.rfind(".") + 1]
    names = {known.removeprefix(prefix).partition(".")[0] for known in keys if known.startswith(prefix)}
    if close := get_close_matches(key.removeprefix(prefix), sorted(names), n=1, cutoff=0.5):
        return prefix + close[0]
    return next(iter(get_close_matches(key, keys, n=1, cutoff=0.5)), None)
