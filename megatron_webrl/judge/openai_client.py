"""Clients of OpenAI-compatible endpoints, which alone hold the keys."""

from __future__ import annotations

import logging
import os

import openai

from megatron_webrl.config.setting import ConfigError
from megatron_webrl.util.text import declare_secret

_TRANSIENT_STATUS = frozenset({408, 409, 425, 429})  # and all of 500 and above
_QUIET_LOGGERS = ("openai", "httpx", "httpx2", "httpcore", "httpcore2")  # at DEBUG they name URLs, headers and bodies


def open_client(url: str, key_variable: str, settings: str, timeout_seconds: float) -> openai.AsyncOpenAI:
    """A client without retries, whose key is declared a secret.

    `settings`: the section of `url` and `key_variable`, for errors, such as judge.*. Raises ConfigError for a missing
    key, and for a key or an address that cannot be used.
    """
    for name in _QUIET_LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(max(logger.level, logging.WARNING))
    key = os.environ.get(key_variable, "").strip() if key_variable else ""
    if key_variable and not key:
        # A name that is not in capitals may be a key that was put there by mistake.
        name = key_variable if key_variable.isupper() else "an environment variable that"
        raise ConfigError(f"{name} is not set ({settings}.key_variable); it must hold the key of {url}")
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            f"the key of {url} has characters that no header can hold ({settings}.key_variable names its "
            "environment variable); copy it again"
        )
    try:
        client = openai.AsyncOpenAI(api_key=key or "none", base_url=url, max_retries=0, timeout=timeout_seconds)
    except Exception as error:
        raise ConfigError(f"{settings}.url={url} is not an endpoint: {type(error).__name__}") from None
    declare_secret(key)
    return client


def is_transient(status: int) -> bool:
    """Whether an HTTP status may pass: another attempt may succeed."""
    return status in _TRANSIENT_STATUS or status >= 500
