"""The pages of several runs in one application: each under /runs/NAME/, the first one also under /.

GET /api/runs                        all runs: name, folder, last update, episodes; the settings in which they differ
GET /runs/NAME/...                   the pages and answers of one run (app.py)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.types import Receive, Scope, Send

from megatron_webrl.config.load import flatten_config
from megatron_webrl.config.schema import Config
from megatron_webrl.monitor.app import RunPages, answers, error_answer
from megatron_webrl.monitor.episode_view import cut
from megatron_webrl.util.text import redact

OWN_SETTINGS = ("run.name", "run.directory")  # that differ between any two runs


class RunSet:
    """The runs by name. `refresh` takes in what their files have gained."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises ConfigError. A name that two folders have gets a number."""
        self.pages: dict[str, RunPages] = {}
        for folder in folders:
            self.pages[_free_name(folder.resolve().name, self.pages)] = RunPages(folder)
        self._apps: dict[str, Starlette] = {}

    def refresh(self) -> None:
        for pages in self.pages.values():
            pages.refresh()

    def close(self) -> None:
        """End what the server waits for."""
        for pages in self.pages.values():
            pages.live.close()

    def app(self) -> Starlette:
        """The application, without its access control."""
        self._apps = {name: pages.app() for name, pages in self.pages.items()}
        routes = [
            Route("/api/runs", answers(self.runs)),
            Route("/runs/{name}", _with_slash),
            Mount("/runs/{name}", app=self._run),
            Mount("/", app=next(iter(self._apps.values()))),
        ]
        return Starlette(routes=routes, exception_handlers={HTTPException: error_answer})

    def runs(self, request: Request) -> dict[str, Any]:
        described = [pages.run(request) | {"name": name} for name, pages in self.pages.items()]
        return {"runs": described, "settings": differing_settings([each.config for each in self.pages.values()])}

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (app := self._apps.get(scope["path_params"]["name"])) is None:
            raise HTTPException(404, "there is no run of this name")
        await app(scope, receive, send)


def _with_slash(request: Request) -> Response:
    return RedirectResponse(f"{quote(request.path_params['name'], safe='')}/")


def differing_settings(configs: Sequence[Config]) -> list[dict[str, Any]]:
    """{"name", "values"} of each setting that is not the same in all configurations, without secrets."""
    flat: list[Mapping[str, Any]] = [flatten_config(config) for config in configs]
    found = []
    for name in dict.fromkeys(name for settings in flat for name in settings):  # variants differ in their settings
        values = [str(settings.get(name, "")) for settings in flat]
        if len(set(values)) > 1 and name not in OWN_SETTINGS:
            found.append({"name": name, "values": [cut(redact(value)) for value in values]})
    return found


def _free_name(name: str, taken: Mapping[str, object]) -> str:
    return name if name not in taken else next(free for n in count(2) if (free := f"{name}-{n}") not in taken)
