"""Sessions whose episode is over and whose page may serve another one, where the task source permits it."""

from __future__ import annotations

from megatron_webrl.browser.browser_instance import BrowserInstance
from megatron_webrl.browser.session import Session
from megatron_webrl.types import Task


class SessionCache:
    """At most `limit` sessions, the longest unused of which makes room for another."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: dict[Session, BrowserInstance] = {}  # in the order of their arrival

    def __len__(self) -> int:
        return len(self._sessions)

    def pop_for(self, task: Task) -> tuple[BrowserInstance, Session] | None:
        """A session that was last in the task's environment, else one of the same source, else None."""
        fitting = [session for session in self._sessions if session.task and session.task.source == task.source]
        if not fitting:
            return None
        same = [s for s in fitting if s.task and s.task.environment == task.environment]
        session = (same or fitting)[0]
        return self._sessions.pop(session), session

    def put(self, carrier: BrowserInstance, session: Session) -> list[tuple[BrowserInstance, Session]]:
        """Keep a session; returns those that are to be released for it."""
        self._sessions[session] = carrier
        return self._let_go(list(self._sessions)[: max(0, len(self) - self._limit)])

    def evict_browser(self, carrier: BrowserInstance) -> list[tuple[BrowserInstance, Session]]:
        """Those on a browser that is to end; they are kept no longer."""
        return self._let_go([session for session, on in self._sessions.items() if on is carrier])

    def discard(self, session: Session) -> bool:
        """Forget a session that is of no more use; whether it was kept."""
        return self._sessions.pop(session, None) is not None

    def _let_go(self, sessions: list[Session]) -> list[tuple[BrowserInstance, Session]]:
        return [(self._sessions.pop(session), session) for session in sessions]
