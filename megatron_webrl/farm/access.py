"""Who may send which requests to browser server and router."""

from __future__ import annotations

from pathlib import Path

from megatron_webrl.farm.protocol import API_PREFIX, CLIENT_ROLE, TOKEN_VARIABLE
from megatron_webrl.service.tokens import Token, read_token, reason_for_token


def role_of(path: str) -> str | None:
    """The role whose token a path needs; None: it needs none."""
    return CLIENT_ROLE if path == API_PREFIX or path.startswith(f"{API_PREFIX}/") else None


def read_client_token(host: str, file: Path | None) -> Token | None:
    """The token of clients; None is possible on loopback. Raises ConfigError."""
    return read_token(CLIENT_ROLE, TOKEN_VARIABLE, "--token-file", file, reason_for_token(host))
