"""What a client asks for, as a task and an action that a node can carry out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_webrl.browser.egress.egress_policy import EgressDenied, split_url
from megatron_webrl.config.schema import Config
from megatron_webrl.farm.protocol import ResetRequest
from megatron_webrl.tasks.registry import make_all_sources
from megatron_webrl.tasks.source import TaskSource
from megatron_webrl.tasks.web import SOURCE_NAME as WEB
from megatron_webrl.tasks.web import OpenWeb
from megatron_webrl.types import COORDINATE_RANGE, Action, Task

ALLOWED_SEEDS = range(0, 2**31)  # of training and held-out pages


class InvalidRequest(ValueError):
    """A request that cannot be meant; the message begins with the field."""


@dataclass(frozen=True)
class TaskCatalog:
    """Everything that a node can open."""

    sources: Mapping[str, TaskSource]
    web: OpenWeb | None  # None: browser.open_web is off

    @classmethod
    def from_config(cls, config: Config) -> TaskCatalog:
        """All sources, started; `close` ends them. Raises ConfigError."""
        return cls(make_all_sources(config.tasks), OpenWeb(config.tasks.max_steps) if config.browser.open_web else None)

    def close(self) -> None:
        """Give back what the sources hold."""
        for source in self.sources.values():
            source.close()

    @property
    def sites(self) -> dict[str, TaskSource | OpenWeb]:
        """Where tasks are done, by the name of their source."""
        return {**self.sources, **({WEB: self.web} if self.web is not None else {})}

    @property
    def environments(self) -> dict[str, tuple[str, ...]]:
        """By source."""
        return {name: tuple(site.environments) for name, site in self.sites.items()}

    def resolve_task(self, request: ResetRequest) -> Task:
        """The task that a reset asks for. Raises BadInput."""
        ways = [name for name in ("task", "source", "url") if getattr(request, name) is not None]
        if len(ways) != 1:
            raise InvalidRequest(f"task, source, url: give one of them, not {' and '.join(ways) or 'none'}")
        if request.task is not None:
            return self._checked(request.task)
        if request.url is not None:
            return self._open_web("url").make_task(_web_address("url", request.url), request.instruction)
        assert request.source is not None
        if request.source == WEB:
            raise InvalidRequest(f"source: give url instead, which the source {WEB} opens")
        _check_name("source", request.source, sorted(self.sources))
        source = self.sources[request.source]
        _check_name("environment", request.environment or "", source.environments)
        _check_seed("seed", request.seed)
        return source.make_task(request.environment or "", request.seed)

    def _checked(self, task: Task) -> Task:
        if task.source == WEB:
            self._open_web("task.source")
            _web_address("task.url", task.url or "")
            return task
        _check_name("task.source", task.source, sorted(self.sources))
        _check_name("task.environment", task.environment, self.sources[task.source].environments)
        _check_seed("task.seed", task.seed)
        return task

    def _open_web(self, field: str) -> OpenWeb:
        if self.web is None:
            raise InvalidRequest(f"{field}: this node opens no pages of the web; start it with browser.open_web=true")
        return self.web


def validate_action(action: Action) -> Action:
    """The action, if its coordinates are some. Raises BadInput."""
    for field in ("coordinate", "end_coordinate"):
        place = getattr(action, field)
        if place is not None and not all(0 <= number <= COORDINATE_RANGE for number in place):
            raise InvalidRequest(f"{field}: {list(place)} is not within 0..{COORDINATE_RANGE}")
    return action


def _check_name(field: str, name: str, known: Sequence[str]) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=4, cutoff=0.4) if len(name) < 100 else []
    hint = f"near: {', '.join(near)}" if near else f"one of {', '.join(sorted(known)[:4])}, ..."
    raise InvalidRequest(f"{field}: {name[:80]!r} is not known here; {hint}")


def _check_seed(field: str, seed: int) -> None:
    if seed not in ALLOWED_SEEDS:
        raise InvalidRequest(f"{field}: {seed} is not within 0..{ALLOWED_SEEDS.stop - 1}")


def _web_address(field: str, url: str) -> str:
    try:
        scheme, _, _ = split_url(url)
    except EgressDenied as refused:
        raise InvalidRequest(f"{field}: {refused}") from None
    if scheme not in ("http", "https"):
        raise InvalidRequest(f"{field}: {scheme}: is not one of http, https")
    return url
