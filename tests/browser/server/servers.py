"""Configuration of test servers, and their processes."""

from __future__ import annotations

from typing import Any

import psutil

from megatron_webrl.config.browser import BrowserConfig
from megatron_webrl.config.rollout import RolloutConfig
from megatron_webrl.config.schema import Config
from megatron_webrl.types import Task
from tests.browser.browser_processes import browser_pids, command_line

LIMIT = 30.0  # seconds; CI machines are slow


def config_for(**browser: Any) -> Config:
    """Small screenshots; `browser` are settings of BrowserConfig."""
    chosen = {"width": 160, "height": 210, "screenshot": "png"} | browser
    return Config(browser=BrowserConfig(**chosen), rollout=RolloutConfig(operation_timeout_seconds=20))


def click_task(environment: str = "click-test") -> Task:
    return Task(f"miniwob/{environment}/1", "miniwob", environment, seed=1, max_steps=3)


def server_processes() -> list[psutil.Process]:
    found = [child for child in psutil.Process().children() if "serve" in command_line(child)]
    return sorted(found, key=lambda process: process.create_time())


def browser_of(server: psutil.Process) -> psutil.Process:
    """The Chromium of a server: neither the shell script that started it nor one of its helpers."""
    return psutil.Process(browser_pids("browser", server.pid)[0])
