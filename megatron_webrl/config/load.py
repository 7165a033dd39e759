"""Read a configuration: a YAML file and command-line overrides, merged by OmegaConf into the typed schema."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.util import atomic_file
from megatron_webrl.util.shipped import find_shipped
from megatron_webrl.util.text import first_line


def parse_config(path: str | Path | None, overrides: Sequence[str] | None = None) -> Config:
    """Read a configuration, or take the defaults, and check types and keys only. Raises ConfigError.

    A file of configs/, and a model.path of models/, that are not there are those of the package.
    """
    path = None if path is None else find_shipped(path)
    if path is not None and not path.is_file():
        raise ConfigError(f"configuration {path} is not a file")
    try:
        file = OmegaConf.load(path) if path is not None else OmegaConf.create({})
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {first_line(error)}") from error
    if not isinstance(file, DictConfig):
        raise ConfigError(f"{path} does not hold a mapping of sections")
    config = merge_config(file, overrides or [], f"{path} or an override" if path is not None else "an override")
    resolve_cluster_sizes(config)
    if config.model.path:
        config.model.path = str(find_shipped(config.model.path))
    return config


def merge_config(file: DictConfig, overrides: Sequence[str], place: str) -> Config:
    """The defaults, replaced by the settings of a file and by overrides, key=value. Raises ConfigError.

    A section with variants takes the settings of the chosen one alone. If an override chooses another variant than the
    file, what the file says about the former one is left out.
    """
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"override {override!r} is not of the form key=value")
    try:
        given = OmegaConf.from_dotlist(list(overrides))
        config = Config()
        _choose_variants(config, file, given, "")
        merged = OmegaConf.merge(_schema(config), file, given)
        found = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(_one_line(error, place)) from error
    assert isinstance(found, Config)
    return found


_SCHEMAS: dict[str, DictConfig] = {}  # by the defaults


def _schema(defaults: Config) -> DictConfig:
    """OmegaConf's form of the defaults, made once, as that takes a tenth of a second. Merging copies it."""
    key = repr(defaults)
    if key not in _SCHEMAS:
        _SCHEMAS[key] = OmegaConf.structured(defaults)
    return _SCHEMAS[key]


def _choose_variants(config: Any, file: Any, given: Any, prefix: str) -> None:
    """Make each section that has variants the one that is named; `file` loses defaults of another one."""
    for spec in dataclasses.fields(config):
        name, section = spec.name, getattr(config, spec.name)
        if not dataclasses.is_dataclass(section):
            continue
        first = f"{prefix}{name}.{dataclasses.fields(section)[0].name}"
        in_file, in_given = _section(file, name, first), _section(given, name, first)
        if choice := spec.metadata.get("variants"):
            if in_file is not None and in_file.get(choice.key) is not None:
                section = choice.make(prefix + name, in_file[choice.key])
            if in_given is not None and in_given.get(choice.key) is not None:
                other = choice.make(prefix + name, in_given[choice.key])
                former = {each.name for each in dataclasses.fields(section)}
                for key in former.difference(each.name for each in dataclasses.fields(other)):
                    if in_file is not None:
                        in_file.pop(key, None)
                section = other
            setattr(config, name, section)
        _choose_variants(section, in_file, in_given, f"{prefix}{name}.")


def _section(settings: DictConfig | None, name: str, first: str) -> DictConfig | None:
    """A section of what was given; None without one. `first`: a setting of it. Raises ConfigError for a plain value."""
    found = settings.get(name) if settings is not None else None
    if found is not None and not isinstance(found, DictConfig):
        raise ConfigError(f"{first.rpartition('.')[0]}={found} is a section, not a setting; set {first}, ...")
    return found


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
        (trainer, "trainer.data_parallel", config.trainer_gpus_per_node, replica),
        (rollout, "rollout.engines", config.engine_gpus_per_node, config.ranks_per_engine),
    ):
        field = name.split(".")[1]
        if getattr(section, field) != 0:
            continue
        if cluster.gpus_per_node == 0:
            raise ConfigError(
                f"{name}=0 asks cluster.* for a number, but cluster.gpus_per_node=0; give a number of at least 1"
            )
        found, left = divmod(cluster.nodes * gpus, size) if size > 0 else (0, 0)
        if found < 1 or left:
            raise ConfigError(
                f"{name}=0: {cluster.nodes} x {gpus} GPUs (cluster.nodes, and cluster.engine_gpus_per_node="
                f"{cluster.engine_gpus_per_node} of cluster.gpus_per_node={cluster.gpus_per_node}) cannot be shared "
                f"out by {size}; change these or the parallel sizes"
            )
        setattr(section, field, found)


def config_text(config: Config) -> str:
    """The resolved configuration as YAML that `load` reads back."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration."""
    atomic_file.write_text(path, config_text(config))


def all_settings(config: Any = None, prefix: str = "") -> dict[str, list[str]]:
    """Every setting by its dotted key: the variants that have it, such as "trainer.loss.name=grpo"; none: all."""
    config = Config() if config is None else config
    found: dict[str, list[str]] = {}
    for spec in dataclasses.fields(config):
        value, key = getattr(config, spec.name), f"{prefix}{spec.name}"
        if choice := spec.metadata.get("variants"):
            for kind, names in choice.distinct().items():
                for inner in all_settings(kind(), f"{key}."):
                    found.setdefault(inner, []).extend(f"{key}.{choice.key}={name}" for name in names)
        elif dataclasses.is_dataclass(value):
            found |= all_settings(value, f"{key}.")
        else:
            found[key] = []
    return found


def _one_line(error: OmegaConfBaseException, place: str) -> str:
    message = first_line(error)
    key = error.full_key or error.key
    if key is None:
        return message
    if "not in" not in message:
        return f"{key}: {message}"
    known = all_settings()
    owners = [each for setting, names in known.items() if f"{setting}.".startswith(f"{key}.") for each in names]
    if owners:
        return f"{key} in {place} is a setting of {', '.join(dict.fromkeys(owners))} only; leave it out"
    nearest = _nearest_key(key, list(known))
    hint = f"; did you mean {nearest}?" if nearest else ";"
    return f"unknown setting {key} in {place}{hint} docs/configuration.md lists all settings"


def _nearest_key(key: str, keys: list[str]) -> str | None:
    """The key most like an unknown one: within its section if there is a similar name, else among all settings."""
    prefix = key[: key.rfind(".") + 1]
    names = {known.removeprefix(prefix).partition(".")[0] for known in keys if known.startswith(prefix)}
    if close := get_close_matches(key.removeprefix(prefix), sorted(names), n=1, cutoff=0.5):
        return prefix + close[0]
    return next(iter(get_close_matches(key, keys, n=1, cutoff=0.5)), None)
