"""Validation of what a configuration needs on the machine that runs its tasks: task pages, a browser, evaluators; and
of a configuration on a machine that will not run it, such as a login node.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_webrl.config.load import parse_config
from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.launch.validation import MACHINE_CHECKS, check_settings
from megatron_webrl.model import parameter_counts
from megatron_webrl.model.hf_config import read_model_config
from megatron_webrl.tasks.evaluation_count import evaluation_task_indices
from megatron_webrl.track.latest_checkpoint import find_latest_checkpoint

if TYPE_CHECKING:
    from megatron_webrl.tasks.web_pages import WebPageSource


def check_tasks_and_browser(config: Config, *, require_browser: bool = True) -> None:
    """Check that the tasks exist, and the browser unless it runs on another machine. Raises ConfigError."""
    from megatron_webrl.tasks.registry import make_source
    from megatron_webrl.tasks.web_pages import WebPageSource

    source = make_source(config.tasks)
    if isinstance(source, WebPageSource):
        _check_websites(config, source)
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
    import asyncio

    from megatron_webrl.judge.budget import LocalMeter
    from megatron_webrl.judge.evaluation import open_evaluator

    async def open_and_close() -> None:
        async with open_evaluator(config.judge, LocalMeter(config.judge.budget)):
            pass

    asyncio.run(open_and_close())


def _check_resumed_file(config: Config) -> None:
    """Check that the training file has the rows that it had when the run wrote its newest checkpoint."""
    from megatron_webrl.tasks.files.table import difference_from_checkpoint, task_file_digests

    checkpoint = find_latest_checkpoint(config.run_folder)
    if checkpoint is None or not (checkpoint / "state.json").is_file():
        return  # launch/validation.py names what is missing
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
