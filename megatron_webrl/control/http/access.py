"""Access to an HTTP service: TLS, tokens, and the middleware that checks each request before the application."""

from __future__ import annotations

import argparse
import hmac
import json
import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.util.network import is_loopback

MIN_TOKEN_CHARS = 16
MAX_BODY_BYTES = 64 * 1024


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `server_context` to the parser of a service."""
    for option, text in (
        ("--tls-certificate", "certificate for https, with those of its issuers"),
        ("--tls-key", "private key"),
    ):
        parser.add_argument(option, type=Path, metavar="FILE", help=f"PEM file with the {text}")


def server_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """The TLS settings of a service with these files; None without them. Raises ConfigError."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("--tls-certificate and --tls-key belong together; give both, or neither")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    named = f"--tls-certificate={certificate} with --tls-key={key}"
    try:
        context.load_cert_chain(certificate, key, password=_refuse_password)
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        raise ConfigError(f"{named} cannot be used: {error}; give PEM files without a password") from None
    return context


def client_context(ca: str, origin: str) -> ssl.SSLContext:
    """The TLS settings of a client. `ca`: PEM file of the issuers to trust, from the setting `origin`; empty: those of
    the system. Raises ConfigError.
    """
    try:
        return ssl.create_default_context(cafile=ca or None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{origin}={ca} cannot be used: {error}; give a PEM file of certificates") from None


def _refuse_password() -> str:
    raise ValueError("the key has a password")


@dataclass(frozen=True)
class Token:
    """The secret that clients of a service send. Its text never shows the value."""

    variable: str  # environment variable, or file, that holds the value
    value: str = field(repr=False)


def read_token(variable: str, option: str, file: Path | None, needed: str) -> Token | None:
    """Read a token from the file of an option, else from the environment. `needed`: why there must be one; if empty,
    None is returned without one. Raises ConfigError.
    """
    if file is not None:
        try:
            value = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{option}={file} cannot be read: {getattr(error, 'strerror', 'not a text')}") from None
        origin = f"{option}={file}"
        if not value:
            raise ConfigError(f"{origin} is empty; write a secret into it")
    else:
        value, origin = os.environ.get(variable, "").strip(), variable
        if not value and needed:
            raise ConfigError(f"{variable} is not set, and {needed}; set {variable} or {option} to a secret")
        if not value:
            return None
    if len(value) < MIN_TOKEN_CHARS or not value.isascii() or not value.isprintable() or " " in value:
        raise ConfigError(f"the token of {origin} is not at least {MIN_TOKEN_CHARS} letters and digits without spaces")
    return Token(variable, value)


def reason_for_token(host: str) -> str:
    """Why a service that listens on `host` needs a token; empty on loopback."""
    return "" if is_loopback(host) else f"--host={host} is not a loopback address"


def encoded(content: Any) -> bytes:
    """JSON in ASCII: lone surrogates survive."""
    return json.dumps(content).encode()


async def send_json(send: Send, status: int, body: bytes) -> None:
    """Send a response with a JSON body."""
    headers: list[Any] = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class AuthMiddleware:
    """A request must carry the token, and announce a body within a limit. Without a token, its Host must be loopback
    and its Origin the same: this stops web pages that rebind their name to this machine or post to it.
    """

    def __init__(
        self, app: ASGIApp, token: Token | None, is_open: Callable[[str], bool], error_body: Callable[[str], bytes],
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:  # fmt: skip
        """`is_open`: whether a path needs no token; `error_body`: JSON of an error message."""
        self._app, self._token, self._is_open, self._error_body = app, token, is_open, error_body
        self._limit = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request or reject it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        refusal = self._token_refusal(scope["path"], headers) if self._token else _page_refusal(headers)
        if (refusal := refusal or self._body_refusal(headers)) is None:
            await self._app(scope, receive, send)
        else:
            await send_json(send, refusal[0], self._error_body(refusal[1]))

    def _token_refusal(self, path: str, headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
        assert self._token is not None
        sent = headers.get(b"authorization", b"")
        if self._is_open(path) or hmac.compare_digest(sent, f"Bearer {self._token.value}".encode()):
            return None
        name = self._token.variable
        return 401, f"a token is required: send Authorization: Bearer with the value of {name} on the server"

    def _body_refusal(self, headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
        """The HTTP parser holds a client to the length that it has announced."""
        if b"transfer-encoding" in headers:
            return 411, "send the body with Content-Length, not in chunks"
        if int(headers.get(b"content-length", b"0")) > self._limit:
            return 413, f"the body is larger than {self._limit} bytes"
        return None


def _page_refusal(headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
    host = headers.get(b"host", b"").decode("latin-1")
    name = host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
    if not is_loopback(name):
        return 403, "this server has no token and accepts loopback host names only, such as localhost"
    origin = headers.get(b"origin", b"").decode("latin-1")
    if origin and _netloc(origin) != host:
        return 403, "this server has no token and does not accept requests of pages of other origins"
    return None


def _netloc(origin: str) -> str:
    """Host and port of an origin; empty if it has none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
