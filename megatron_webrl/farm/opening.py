"""What a client asks for, as a task and an action that a node can carry out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_webrl.browser.policy import Refused, split_url
from megatron_webrl.config import Config
from megatron_webrl.farm.wire import Reset
from megatron_webrl.tasks.registry import every_source
from megatron_webrl.tasks.source import TaskSite, TaskSource
from megatron_webrl.tasks.web import NAME as WEB
from megatron_webrl.tasks.web import Web
from megatron_webrl.types import COORDINATE_RANGE, Action, Task

SEEDS = range(0, 2**31)  # of training and held-out pages


class BadInput(ValueError):
    """A request that cannot be meant; the message begins with the field."""


@dataclass(frozen=True)
class Catalogue:
    """Everything that a node can open."""

    sources: Mapping[str, TaskSource]
    web: Web | None  # None: browser.open_web is off

    @classmethod
    def of(cls, config: Config) -> Catalogue:
        """All sources, started; `close` ends them. Raises ConfigError."""
        return cls(every_source(config.tasks), Web(config.tasks.max_steps) if config.browser.open_web else None)

    def close(self) -> None:
        """Give back what the sources hold."""
        for source in self.sources.values():
            source.close()

    @property
    def sites(self) -> dict[str, TaskSite]:
        """Where tasks are done, by the name of their source."""
        return {**self.sources, **({WEB: self.web} if self.web is not None else {})}

    @property
    def environments(self) -> dict[str, tuple[str, ...]]:
        """By source."""
        return {name: tuple(site.environments) for name, site in self.sites.items()}

    def task(self, asked: Reset) -> Task:
        """The task that a reset asks for. Raises BadInput."""
        ways = [name for name in ("task", "source", "url") if getattr(asked, name) is not None]
        if len(ways) != 1:
            raise BadInput(f"task, source, url: give one of them, not {' and '.join(ways) or 'none'}")
        if asked.task is not None:
            return self._checked(asked.task)
        if asked.url is not None:
            return self._open_web("url").page(_web_address("url", asked.url), asked.instruction)
        assert asked.source is not None
        if asked.source == WEB:
            raise BadInput(f"source: give url instead, which the source {WEB} opens")
        _check_name("source", asked.source, sorted(self.sources))
        source = self.sources[asked.source]
        _check_name("environment", asked.environment or "", source.environments)
        _check_seed("seed", asked.seed)
        return source.make(asked.environment or "", asked.seed)

    def _checked(self, task: Task) -> Task:
        if task.source == WEB:
            self._open_web("task.source")
            _web_address("task.url", task.url or "")
            return task
        _check_name("task.source", task.source, sorted(self.sources))
        _check_name("task.environment", task.environment, self.sources[task.source].environments)
        _check_seed("task.seed", task.seed)
        return task

    def _open_web(self, field: str) -> Web:
        if self.web is None:
            raise BadInput(f"{field}: this node opens no pages of the web; start it with browser.open_web=true")
        return self.web


def checked(action: Action) -> Action:
    """The action, if its coordinates are some. Raises BadInput."""
    for field in ("coordinate", "end_coordinate"):
        place = getattr(action, field)
        if place is not None and not all(0 <= number <= COORDINATE_RANGE for number in place):
            raise BadInput(f"{field}: {list(place)} is not within 0..{COORDINATE_RANGE}")
    return action


def _check_name(field: str, name: str, known: Sequence[str]) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=4, cutoff=0.4) if len(name) < 100 else []
    hint = f"near: {', '.join(near)}" if near else f"one of {', '.join(sorted(known)[:4])}, ..."
    raise BadInput(f"{field}: {name[:80]!r} is not known here; {hint}")


def _check_seed(field: str, seed: int) -> None:
    if seed not in SEEDS:
        raise BadInput(f"{field}: {seed} is not within 0..{SEEDS.stop - 1}")


def _web_address(field: str, url: str) -> str:
    try:
        scheme, _, _ = split_url(url)
    except Refused as refused:
        raise BadInput(f"{field}: {refused}") from None
    if scheme not in ("http", "https"):
        raise BadInput(f"{field}: {scheme}: is not one of http, https")
    return url
