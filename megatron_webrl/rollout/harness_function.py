"""The program of a harness that is a Python function: calls it for one episode, and reports what it returns.

    def run(episode: HarnessEpisode) -> str | dict | None: ...  # or async

A text is the agent's answer; a dictionary has "answer", "reward" or both.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import urllib.request
from dataclasses import dataclass
from typing import Any

from megatron_webrl.config.import_path import find_function
from megatron_webrl.config.setting import ConfigError


@dataclass(frozen=True)
class HarnessEpisode:
    """What a harness gets to know of its episode."""

    task: dict[str, Any]  # id, source, environment, instruction, url of the page that is open, max_steps
    cdp_url: str  # of the browser, http://host:port
    base_url: str  # of OpenAI's API
    api_key: str
    model: str
    result_url: str

    @classmethod
    def current(cls) -> HarnessEpisode:
        """The episode of this process. Raises KeyError in a process that is no harness."""
        names = ("WEBRL_CDP_URL", "OPENAI_BASE_URL", "OPENAI_API_KEY", "WEBRL_MODEL", "WEBRL_RESULT_URL")
        return cls(json.loads(os.environ["WEBRL_TASK"]), *(os.environ[name] for name in names))

    def report(self, answer: str | None = None, reward: float | None = None) -> None:
        """End the episode with a result."""
        self.post(self.result_url, {"answer": answer, "reward": reward})

    def post(self, url: str, body: Any) -> Any:
        """The answer of this episode's model or result address to a request, both JSON."""
        headers = {"Authorization": f"Bearer {self.api_key}", "Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)


def main(path: str) -> None:
    try:
        function = find_function(path, "rollout.agent.command", ("episode",))
    except ConfigError as error:
        sys.exit(str(error))
    episode = HarnessEpisode.current()
    result = function(episode)
    if inspect.isawaitable(result):
        result = asyncio.run(_awaited(result))
    episode.report(**(result if isinstance(result, dict) else {"answer": result}))


async def _awaited(result: Any) -> Any:
    return await result


if __name__ == "__main__":
    main(sys.argv[1])
