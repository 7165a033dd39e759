"""Who may send which requests to browser server and router."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_webrl.browser.server.protocol import API_PREFIX, SERVER_TOKEN_VARIABLE, TOKEN_VARIABLE
from megatron_webrl.config.setting import ConfigError
from megatron_webrl.control.http.tokens import Token, read_token, reason_for_token

CLIENT, SERVER = "client", "server"
"""Roles: one leases and uses sessions; the other registers browser servers with a router."""

SERVERS_PATH = f"{API_PREFIX}/servers"


@dataclass(frozen=True)
class TokenFiles:
    """Files with tokens; None: the environment has it."""

    client: Path | None = None
    server: Path | None = None


@dataclass(frozen=True)
class Tokens:
    """The tokens of a farm; None on loopback without tokens."""

    client: Token | None
    server: Token | None

    def all(self) -> list[Token]:
        """The tokens that there are."""
        return [token for token in (self.client, self.server) if token is not None]


def role_of(path: str) -> str | None:
    """The role whose token a path needs; None: it needs none."""
    if path != API_PREFIX and not path.startswith(f"{API_PREFIX}/"):
        return None
    return SERVER if path == SERVERS_PATH or path.startswith(f"{SERVERS_PATH}/") else CLIENT


def read_tokens(host: str, files: TokenFiles, with_router: bool) -> Tokens:
    """The tokens of a service that listens on `host`. `with_router`: it is a router or registers with one, and so
    has the token of servers, if there are tokens. Raises ConfigError.
    """
    client = read_token(CLIENT, TOKEN_VARIABLE, "--token-file", files.client, reason_for_token(host))
    if not with_router:
        return Tokens(client, None)
    needed = "browser servers register with a token other than that of clients" if client else ""
    server = read_token(SERVER, SERVER_TOKEN_VARIABLE, "--server-token-file", files.server, needed)
    if server is not None and client is None:
        raise ConfigError(
            f"{SERVER_TOKEN_VARIABLE} is set, but {TOKEN_VARIABLE} is not; set both, or on loopback neither"
        )
    if server is not None and client is not None and server.value == client.value:
        raise ConfigError(
            f"{SERVER_TOKEN_VARIABLE} and {TOKEN_VARIABLE} are the same; a client could register a server of its own: "
            "set two secrets"
        )
    return Tokens(client, server)
