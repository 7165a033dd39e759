"""What a browser server can open, and the task that a client's reset request names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_webrl.browser.egress.egress_policy import EgressDenied, split_url
from megatron_webrl.browser.server.protocol import InvalidRequest, ResetRequest
from megatron_webrl.config.schema import Config
from megatron_webrl.tasks.registry import make_all_sources
from megatron_webrl.tasks.sites.website_server import OfflineWebsites
from megatron_webrl.tasks.sites.websites import offline_host
from megatron_webrl.tasks.source import TaskSource
from megatron_webrl.tasks.web import SOURCE_NAME as WEB
from megatron_webrl.tasks.web import OpenWeb
from megatron_webrl.types import Task
from megatron_webrl.util.text import close_matches

ALLOWED_SEEDS = range(0, 2**31)  # page seeds of training and evaluation


@dataclass(frozen=True)
class TaskCatalog:
    """Everything that a browser server can open."""

    sources: Mapping[str, TaskSource]
    web: OpenWeb | None  # None: browser.open_web and tasks.offline_websites are off

    @classmethod
    def from_config(cls, config: Config) -> TaskCatalog:
        """Start all sources; `close` stops them. Raises ConfigError."""
        tasks, open_web = config.tasks, config.browser.open_web
        web = OpenWeb(tasks.max_steps) if open_web else None
        if tasks.offline_websites:
            web = OfflineWebsites(tasks.latency, tasks.max_steps, open_web)
        return cls(make_all_sources(tasks), web)

    def close(self) -> None:
        """Stop all sources."""
        for site in self.sites.values():
            site.close()

    @property
    def sites(self) -> dict[str, TaskSource | OpenWeb]:
        """Task sites by the name of their source."""
        return {**self.sources, **({WEB: self.web} if self.web is not None else {})}

    @property
    def environments(self) -> dict[str, tuple[str, ...]]:
        """Environments by source."""
        return {name: tuple(site.environments) for name, site in self.sites.items()}

    def resolve_task(self, request: ResetRequest) -> Task:
        """The task of a reset request. Raises InvalidRequest."""
        given = [name for name in ("task", "source", "url") if getattr(request, name) is not None]
        if len(given) != 1:
            raise InvalidRequest(f"task, source, url: give one of them, not {' and '.join(given) or 'none'}")
        if request.url is not None:
            return self._open_web("url", request.url).task_at(request.url, request.instruction)
        task, prefix = request.task, "" if request.task is None else "task."
        named = request if task is None else task
        source, environment = named.source or "", named.environment or ""
        if source == WEB:
            if task is None:
                raise InvalidRequest(f"source: give url instead, which the source {WEB} opens")
            self._open_web("task.url", task.url or "")
            return task
        _check_name(f"{prefix}source", source, sorted(self.sources))
        _check_name(f"{prefix}environment", environment, self.sources[source].environments)
        if named.seed not in ALLOWED_SEEDS:
            raise InvalidRequest(f"{prefix}seed: {named.seed} is not within 0..{ALLOWED_SEEDS.stop - 1}")
        return task or self.sources[source].make_task(environment, named.seed)

    def _open_web(self, field: str, url: str) -> OpenWeb:
        """The source that opens a URL."""
        if self.web is None:
            setting = "browser.open_web" if offline_host(url) is None else "tasks.offline_websites"
            raise InvalidRequest(f"{field}: this server opens no web pages; start it with {setting}=true")
        try:
            scheme, _, _ = split_url(url)
        except EgressDenied as refused:
            raise InvalidRequest(f"{field}: {refused}") from None
        if scheme not in ("http", "https"):
            raise InvalidRequest(f"{field}: {scheme}: is not one of http, https")
        if not self.web.opens(url):
            raise InvalidRequest(
                f"{field}: {url[:80]!r} is on none of the offline websites; start the server with browser.open_web=true"
            )
        return self.web


def _check_name(field: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        hint = close_matches(name, known) or f"; one of {', '.join(sorted(known)[:4])}, ..."
        raise InvalidRequest(f"{field}: {name[:80]!r} is not known here{hint}")
