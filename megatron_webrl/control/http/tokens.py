"""Tokens of an HTTP service: secrets that clients send, one for each role of a client."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.util.network import is_loopback

MIN_TOKEN_CHARS = 16


@dataclass(frozen=True)
class Token:
    """The secret of the clients of one role. Its text never shows the value."""

    role: str
    variable: str  # environment variable that holds the value
    value: str = field(repr=False)


def read_token(role: str, variable: str, option: str, file: Path | None, needed: str) -> Token | None:
    """Read a token from the file of an option, else from the environment. `needed`: why there must be one; if empty,
    None is returned without one. Raises ConfigError.
    """
    if file is not None:
        try:
            value = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{option}={file} cannot be read: {getattr(error, 'strerror', 'not a text')}") from None
        origin = f"{option}={file}"
    else:
        value, origin = os.environ.get(variable, "").strip(), variable
    if not value:
        if file is not None:
            raise ConfigError(f"{origin} is empty; write a secret into it")
        if needed:
            raise ConfigError(f"{variable} is not set, and {needed}; set {variable} or {option} to a secret")
        return None
    if len(value) < MIN_TOKEN_CHARS or not value.isascii() or not value.isprintable() or " " in value:
        raise ConfigError(f"the token of {origin} is not at least {MIN_TOKEN_CHARS} letters and digits without spaces")
    return Token(role, variable, value)


def reason_for_token(host: str) -> str:
    """Why a service that listens on `host` needs a token; empty on loopback."""
    return "" if is_loopback(host) else f"--host={host} is not a loopback address"
