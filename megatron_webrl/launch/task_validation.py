"""Validation of what a configuration needs on the machine that runs its tasks: task pages and a browser."""

from __future__ import annotations

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError


def check_tasks_and_browser(config: Config, *, require_browser: bool = True) -> None:
    """Check that the tasks exist, and the browser unless it runs on another machine. Raises ConfigError."""
    from megatron_webrl.browser.chromium import find_chromium
    from megatron_webrl.browser.errors import BrowserMissing
    from megatron_webrl.rollout.demonstrations import check_scripted_policies
    from megatron_webrl.tasks.registry import make_source

    make_source(config.tasks).close()
    if config.trainer.warm_start.demonstrations:
        check_scripted_policies(config)
    if config.browser.farm or not require_browser:
        return
    try:
        find_chromium(config.browser.executable)
    except BrowserMissing as error:
        raise ConfigError(str(error)) from error
