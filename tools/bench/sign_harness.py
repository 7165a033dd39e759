"""The built-in agent of the signs as a harness: the same prompts and clicks, by chat completions and CDP.

    webrl train configs/quickstart.yaml browser.cdp=true browser.reuse_pages=0 rollout.agent.name=harness \
        rollout.agent.command=[tools.bench.sign_harness:run]
"""

from __future__ import annotations

import json
import re
import time
import urllib.request
from typing import Any

from websockets.sync.client import connect

from megatron_webrl.rollout.harness_function import HarnessEpisode

SYSTEM = (
    "<tools>computer_use: left_click, type, scroll, wait, go_back, navigate, answer</tools>\n"
    "Memory: your last notes, unchanged, then new ones; each ends with a semicolon"
)
CALL = re.compile(r'<tool_call>\n\{"name": "computer_use", "arguments": (\{.*\})\}\n</tool_call>$')
MEMORY = re.compile(r"^Memory:(.*?)(?=<tool_call>)", re.MULTILINE | re.DOTALL)
SETTLE_SECONDS = 0.1


class Page:
    """The open page of an episode's browser."""

    def __init__(self, address: str) -> None:
        with urllib.request.urlopen(f"{address}/json/list") as listed:
            target = next(each for each in json.load(listed) if each["type"] == "page")
        self._socket = connect(target["webSocketDebuggerUrl"], max_size=None, compression=None)
        self._number = 0
        self.size = self.call("Page.getLayoutMetrics")["cssLayoutViewport"]

    def call(self, method: str, **arguments: Any) -> Any:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": arguments}))
        while (answer := json.loads(self._socket.recv(30))).get("id") != self._number:
            pass  # an event
        return answer["result"]

    def screenshot(self) -> str:
        """PNG, base64."""
        return str(self.call("Page.captureScreenshot", format="png")["data"])

    def click(self, x: int, y: int) -> None:
        """Click at coordinates 0..1000, and wait until the page has loaded."""
        place = {"x": x * self.size["clientWidth"] / 1000, "y": y * self.size["clientHeight"] / 1000}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)
        time.sleep(SETTLE_SECONDS)
        while self.call("Runtime.evaluate", expression="document.readyState")["result"].get("value") != "complete":
            time.sleep(SETTLE_SECONDS)


def run(episode: HarnessEpisode) -> None:
    """Play an episode: notes are carried, and only the current screenshot is shown."""
    page, history, memory = Page(episode.cdp_url), list[str](), ""
    image = page.screenshot()
    for number in range(1, episode.task["max_steps"] + 1):
        lines = [f"Task: {episode.task['instruction']}", *(["Earlier steps:", *history] if history else [])]
        lines += [memory] if memory else []
        said = _ask(episode, "\n".join(lines) + "\n", image)
        place = _place(said)
        did, effect, after = "no valid tool call", "format error: no_tool_call", image
        if place is not None:
            page.click(*place)
            after = page.screenshot()
            did, effect = f"left_click {place}", "page changed" if after != image else "page unchanged"
        history.append(f"Step {number}: {did} -> {effect}")
        noted = MEMORY.search(said)
        if noted and noted[1].strip():
            memory = f"Memory of step {number}: {' '.join(noted[1].split())}"
        image = after


def _ask(episode: HarnessEpisode, text: str, image: str) -> str:
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    user = {"role": "user", "content": [{"type": "text", "text": text}, picture]}
    body = {"model": episode.model, "messages": [{"role": "system", "content": SYSTEM}, user]}
    answer = episode.post(f"{episode.base_url}/chat/completions", body)
    return str(answer["choices"][0]["message"]["content"])


def _place(said: str) -> list[int] | None:
    """Where a response clicks; None for what is no click."""
    found = CALL.search(said)
    try:
        arguments = json.loads(found[1]) if found else {}
    except ValueError:
        return None
    place = arguments.get("coordinate")
    fits = isinstance(place, list) and len(place) == 2 and all(isinstance(v, int) and 0 <= v <= 1000 for v in place)
    return place if arguments.get("action") == "left_click" and fits else None
