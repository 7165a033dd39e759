"""Validation of a configuration on a machine that will not run it, such as a login node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.task_validation import check_evaluators, check_tasks_and_browser
from megatron_webrl.launch.validation import MACHINE_CHECKS, check_settings
from megatron_webrl.model import parameter_counts
from megatron_webrl.model.hf_config import read_model_config


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
    own_tasks = not (config.tasks.from_files or config.tasks.from_import_path)  # the same on every machine
    check_tasks = partial(check_tasks_and_browser, require_browser=False)
    checks: tuple[Callable[[Config], None], ...] = (*MACHINE_CHECKS, check_evaluators, check_tasks)
    for check in checks:
        try:
            check(config)
        except ConfigError as error:
            if check is check_tasks and own_tasks:
                raise
            lacking.append(str(error))
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            what = "tasks" if check is check_tasks else "evaluators"
            lacking.append(f"the package {package} is not installed here; {what} are not checked")
    return config, lacking
