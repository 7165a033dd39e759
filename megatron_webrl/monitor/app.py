"""The web application of runs: pages (static/) and the JSON that they show. Read only.

GET /api/runs                        all runs, as /api/run describes each; the settings in which they differ
GET /runs/NAME/...                   the pages and answers of one run; without it those of the first one:
GET /                                the pages
GET /api/run                         the run: name, configuration, last update, number of episodes
GET /api/status                      its state, as `webrl status` prints it
GET /api/bound?version=N             what bounded an update, by default the last one, as `webrl timeline` prints it
GET /api/updates?after=VERSION       metrics of the updates after a version
GET /api/evaluations                 evaluations
GET /api/episodes?outcome=...        rows of the index, a page of them, with the values to filter by
GET /api/episodes/ID                 one episode
GET /api/episodes/ID/images/N        its screenshot N
GET /api/episodes/ID/related         rows of its group, and of all episodes of its task

live_view.py has those of the rollouts of a running job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from megatron_webrl.config.schema import Config
from megatron_webrl.config.setting import ConfigError, flatten_config
from megatron_webrl.monitor.access import answers, image_response, json_response, number_of
from megatron_webrl.monitor.episode_index import FACETS, RANGES, SORTABLE, EpisodeIndex, EpisodeQuery
from megatron_webrl.monitor.episode_view import TokenTexts, cut, episode_json
from megatron_webrl.monitor.live_view import LiveRollouts
from megatron_webrl.monitor.status import read_config, read_status
from megatron_webrl.monitor.timeline import read_update
from megatron_webrl.ring.record import decode_trajectory, read_record
from megatron_webrl.ring.segment import RecordError
from megatron_webrl.track import summary
from megatron_webrl.track.episodes import FOLDER, TRAINING
from megatron_webrl.track.evaluations import read_evaluations
from megatron_webrl.track.mlflow_upload import run_id
from megatron_webrl.trainer.credit.advantages import step_advantages
from megatron_webrl.types import Group, Trajectory
from megatron_webrl.util.text import redact

STATIC = Path(__file__).parent / "static"
OWN_SETTINGS = ("run.name", "run.directory")  # that differ between any two runs


class RunPages:
    """The answers for one run. `refresh` takes in what its files have gained."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError."""
        self.folder = folder
        self._open()
        self.live = LiveRollouts(folder, lambda: self._texts)

    def _open(self) -> None:
        number = self.folder.stat().st_ino
        self.config = read_config(self.folder)
        self._number: int | None = number  # of a folder that has its configuration
        self.index = EpisodeIndex(self.folder)
        self._texts = TokenTexts(Path(self.config.model.path))
        self._updates = summary.tail_updates(self.folder)
        self._update_lines: dict[int, dict[str, Any]] = {}  # by version
        self._read = lru_cache(maxsize=8)(self._read_episode)

    def refresh(self) -> None:
        try:
            if self.folder.stat().st_ino != self._number:
                self._open()
        except (OSError, ConfigError):  # between two runs of the name there is none
            self._number = None  # the next folder may get the number of the one before
        self.index.refresh()
        lines = self._updates.poll()
        if lines:  # a trainer that rolled back makes later versions again
            first = lines[0]["version"]
            self._update_lines = {version: line for version, line in self._update_lines.items() if version < first}
        self._update_lines.update({line["version"]: line for line in lines})

    def app(self) -> Starlette:
        """The application, without its access control."""
        routes = [
            Route("/", lambda request: FileResponse(STATIC / "index.html")),
            Mount("/static", StaticFiles(directory=STATIC)),
            Route("/api/run", answers(self.run)),
            Route("/api/status", answers(self.status)),
            Route("/api/bound", answers(self.bound)),
            Route("/api/updates", answers(self.updates)),
            Route("/api/evaluations", answers(lambda request: read_evaluations(self.folder))),
            Route("/api/episodes", answers(self.episodes)),
            Route("/api/episodes/{id:int}", answers(self.episode)),
            Route("/api/episodes/{id:int}/related", answers(self.related)),
            Route("/api/episodes/{id:int}/images/{number:int}", self.image),
            Route("/api/rollouts", answers(self.live.rollouts)),
            Route("/api/rollout", answers(self.live.rollout)),
            Route("/api/rollout/images/{number:int}", self.live.image),
        ]
        return Starlette(routes=routes, exception_handlers=ERROR_ANSWERS)

    def run(self, request: Request) -> dict[str, Any]:
        version = max(self._update_lines, default=0)
        config = self.config
        return {
            "name": self.folder.resolve().name,
            "episodes": len(self.index),
            "version": version,
            "target_updates": config.trainer.updates,
            "model": config.model.path,
            "mode": config.rollout.mode,
            "group_size": config.rollout.group_size,
            "space_gib": config.tracking.episodes_gib,
            "folder": str(self.folder.absolute()),
            "timeline": config.tracking.timeline,
            "mlflow": {"uri": redact(config.tracking_uri), "run_id": run_id(self.folder)},
        }

    def status(self, request: Request) -> dict[str, Any]:
        status = read_status(self.folder, [line for _, line in sorted(self._update_lines.items())])
        return {"lines": status.lines, "tables": status.tables()}

    def bound(self, request: Request) -> dict[str, Any]:
        version = int(number_of(request, "version", 0, low=0))
        return read_update(self.folder, version or None)[0].to_json()

    def updates(self, request: Request) -> list[dict[str, Any]]:
        after = number_of(request, "after", -1)
        return [line for version, line in sorted(self._update_lines.items()) if version > after]

    def episodes(self, request: Request) -> dict[str, Any]:
        query = _query(request)
        offset, limit = number_of(request, "offset", 0, low=0), number_of(request, "limit", 50, low=0)
        found = self.index.search(query, int(offset), int(limit))
        return {"rows": [self._with_file(row) for row in found.rows], "total": found.total, "facets": found.facets}

    def episode(self, request: Request) -> dict[str, Any]:
        row = self._row(request)
        trajectory = self._trajectory(row)
        return episode_json(trajectory, row, self._advantage(row, trajectory), self._texts)

    def related(self, request: Request) -> dict[str, Any]:
        row = self._row(request)
        return {
            "group": [self._with_file(each) for each in self.index.group_of(row)],
            "task": [self._with_file(each) for each in self.index.of_task(row)],
        }

    def image(self, request: Request) -> Response:
        images, number = self._trajectory(self._row(request)).images, request.path_params["number"]
        if number >= len(images):
            raise HTTPException(404, f"the episode has {len(images)} screenshots, from 0")
        return image_response(images[number])

    def _row(self, request: Request) -> dict[str, Any]:
        if (row := self.index.get(request.path_params["id"])) is None:
            raise HTTPException(404, f"there is no episode {request.path_params['id']}")
        return row

    def _with_file(self, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"stored": self._path(row).is_file()}

    def _path(self, row: Mapping[str, Any]) -> Path:
        return self.folder / FOLDER / row["folder"] / row["file"]

    def _trajectory(self, row: Mapping[str, Any]) -> Trajectory:
        return self._read(self._path(row), row["position"])

    def _read_episode(self, path: Path, position: int) -> Trajectory:
        try:
            return decode_trajectory(read_record(path, position), copy=True)
        except FileNotFoundError:
            limit = self.config.tracking.episodes_gib
            raise HTTPException(
                410, f"this episode is not stored any more: tracking.episodes_gib={limit:g} keeps newer ones"
            ) from None
        except (OSError, RecordError) as error:
            raise HTTPException(500, str(error)) from None

    def _advantage(self, row: Mapping[str, Any], trajectory: Trajectory) -> float | None:
        if row["kind"] != TRAINING:
            return None
        members = tuple(self._trajectory(each) for each in self.index.group_of(row))
        advantages = step_advantages([Group(trajectory.ticket, members)], self.config)[0].get(trajectory.index)
        return None if advantages is None else float(advantages.mean())


class RunSet:
    """The runs by name. `refresh` takes in what their files have gained."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises ConfigError. A name that two folders have gets a number."""
        self.pages: dict[str, RunPages] = {}
        for folder in folders:
            name = folder.resolve().name
            names = [name, *(f"{name}-{number}" for number in range(2, len(folders) + 1))]
            self.pages[next(each for each in names if each not in self.pages)] = RunPages(folder)
        self._apps: dict[str, Starlette] = {}

    def refresh(self) -> None:
        for pages in self.pages.values():
            pages.refresh()

    def app(self) -> Starlette:
        """The application, without its access control."""
        self._apps = {name: pages.app() for name, pages in self.pages.items()}
        routes = [
            Route("/api/runs", answers(self.runs)),
            Route("/runs/{name}", lambda request: RedirectResponse(f"{quote(request.path_params['name'], safe='')}/")),
            Mount("/runs/{name}", app=self._run),
            Mount("/", app=next(iter(self._apps.values()))),
        ]
        return Starlette(routes=routes, exception_handlers=ERROR_ANSWERS)

    def runs(self, request: Request) -> dict[str, Any]:
        described = [pages.run(request) | {"name": name} for name, pages in self.pages.items()]
        return {"runs": described, "settings": differing_settings([each.config for each in self.pages.values()])}

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (app := self._apps.get(scope["path_params"]["name"])) is None:
            raise HTTPException(404, "there is no run of this name")
        await app(scope, receive, send)


def differing_settings(configs: Sequence[Config]) -> list[dict[str, Any]]:
    """{"name", "values"} of each setting that is not the same in all configurations, without secrets."""
    flat: list[Mapping[str, Any]] = [flatten_config(config) for config in configs]
    names = dict.fromkeys(name for settings in flat for name in settings)  # variants differ in their settings
    found = {name: [str(settings.get(name, "")) for settings in flat] for name in names if name not in OWN_SETTINGS}
    return [
        {"name": name, "values": [cut(redact(value)) for value in values]}
        for name, values in found.items() if len(set(values)) > 1
    ]  # fmt: skip


def _query(request: Request) -> EpisodeQuery:
    """Filters of a request: field=value, several times for alternatives; field_min and field_max; text; sort=-field."""
    given = request.query_params
    equal = {name: given.getlist(name) for name in (*FACETS, "task") if name in given}
    low, high = (
        {name: number_of(request, f"{name}_{end}", 0.0) for name in RANGES if f"{name}_{end}" in given}
        for end in ("min", "max")
    )
    sort = given.get("sort", "-finished_at")
    if sort.removeprefix("-") not in SORTABLE:
        raise HTTPException(400, f"unknown field {sort!r}; there are {', '.join(SORTABLE)}")
    return EpisodeQuery(equal, low, high, given.get("text", ""), sort.removeprefix("-"), sort.startswith("-"))


def _error_answer(request: Request, error: Exception) -> Response:
    detail, status = (error.detail, error.status_code) if isinstance(error, HTTPException) else (str(error), 404)
    return json_response({"error": detail}, status)


ERROR_ANSWERS = {HTTPException: _error_answer, ConfigError: _error_answer}
