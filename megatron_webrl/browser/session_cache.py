"""Idle sessions kept open so that a later episode can reuse their page."""

from __future__ import annotations

from megatron_webrl.browser.browser_instance import BrowserInstance
from megatron_webrl.browser.session import Session
from megatron_webrl.types import Task


class SessionCache:
    """At most `limit` sessions; the oldest is evicted first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: dict[Session, BrowserInstance] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._sessions)

    def pop_for(self, task: Task) -> tuple[BrowserInstance, Session] | None:
        """Take a session last used for the task's environment, else for its source; None if there is neither."""
        same_source = [session for session in self._sessions if session.task and session.task.source == task.source]
        if not same_source:
            return None
        same_environment = [s for s in same_source if s.task and s.task.environment == task.environment]
        session = (same_environment or same_source)[0]
        return self._sessions.pop(session), session

    def put(self, browser: BrowserInstance, session: Session) -> list[tuple[BrowserInstance, Session]]:
        """Add a session; returns the evicted ones, which the caller must release."""
        self._sessions[session] = browser
        return self._pop(list(self._sessions)[: max(0, len(self) - self._limit)])

    def evict_browser(self, browser: BrowserInstance) -> list[tuple[BrowserInstance, Session]]:
        """Remove and return the sessions of a browser that is about to end."""
        return self._pop([session for session, owner in self._sessions.items() if owner is browser])

    def discard(self, session: Session) -> bool:
        """Remove a lost session; returns whether it was cached."""
        return self._sessions.pop(session, None) is not None

    def _pop(self, sessions: list[Session]) -> list[tuple[BrowserInstance, Session]]:
        return [(self._sessions.pop(session), session) for session in sessions]
