"""Run BrowserGym episodes on request; runs in a Python environment with BrowserGym and without this package.

`browsergym_driver.py CHROMIUM URL`: requests are lines of JSON on standard input, `{"environment", "seed", "clicks",
"waits"}`; responses are `{"reset", "steps"}` in seconds. The first line of output has the versions.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any

import browsergym.miniwob  # noqa: F401  (registers the environments)
import gymnasium
from browsergym.core import _get_global_playwright
from browsergym.core.action.highlevel import HighLevelActionSet
from playwright.sync_api import BrowserType

ACTIONS = HighLevelActionSet(["coord"])


def use_chromium(executable: str) -> None:
    """Launch this browser by default: BrowserGym has no setting for the browser of its chat window."""
    launch = BrowserType.launch

    def launch_installed(self: BrowserType, **options: Any) -> Any:
        return launch(self, **({"executable_path": executable} | options))

    BrowserType.launch = launch_installed  # type: ignore[method-assign]


def run_episode(environment: str, seed: int, clicks: list[tuple[float, float]], waits: bool) -> dict[str, Any]:
    """Run one episode; closing it is not timed."""
    settings: dict[str, Any] = {} if waits else {"slow_mo": 0, "pre_observation_delay": 0.0}
    made = gymnasium.make(
        f"browsergym/miniwob.{environment}", action_mapping=ACTIONS.to_python_code, disable_env_checker=True, **settings
    )
    steps = []
    try:
        started = time.perf_counter()
        made.reset(seed=seed % 2**31)
        reset = time.perf_counter() - started
        for x, y in clicks:
            started = time.perf_counter()
            observation, *_ = made.step(f"mouse_click({x}, {y})")
            steps.append(time.perf_counter() - started)
            if observation["last_action_error"]:
                raise RuntimeError(observation["last_action_error"])
    finally:
        made.close()
    return {"reset": reset, "steps": steps}


def main() -> None:
    """Answer requests until standard input ends."""
    executable, os.environ["MINIWOB_URL"] = sys.argv[1:]
    use_chromium(executable)
    names = ("browsergym-core", "browsergym-miniwob", "playwright")
    answers = sys.stdout
    sys.stdout = sys.stderr  # other modules may print; only responses go to standard output
    print(json.dumps({"versions": " ".join(f"{name} {version(name)}" for name in names)}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run_episode(**json.loads(line))), file=answers, flush=True)
    _get_global_playwright().stop()


if __name__ == "__main__":
    main()
