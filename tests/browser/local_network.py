"""A network of a test's own: 127.0.0.1 stands in for a public address; 127.0.0.2 must not be reached."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

FORBIDDEN = "127.0.0.2"


class WebServer(ABC):
    """Serves one request per connection on one address. Counts connections."""

    def __init__(self, address: str) -> None:
        self.address, self.port = address, 0
        self.connections = 0

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, self.address, port)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        self._server.close()

    @abstractmethod
    async def respond(self, path: str, writer: asyncio.StreamWriter) -> None:
        """Write the response to a GET request."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            await self.respond(head.split(b" ")[1].decode("latin-1"), writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


class NameService:
    """Resolves names as a test says, all others to the public address."""

    def __init__(self) -> None:
        self.answers: dict[str, list[str]] = {"inner.test": [FORBIDDEN]}

    async def look_up(self, host: str) -> list[str]:
        return self.answers.get(host.removesuffix("."), ["127.0.0.1"])
